"""A stand-in for a server process, for faults of starting and ending: `fake_server.py MODE --flag value...`

It writes its process id and flags to the file that FAKE_OUT names, and answers /ready like SGLang.
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Answers(BaseHTTPRequestHandler):
    ready, ping = 200, 200

    def do_GET(self):
        self.send_response({"/ready": self.ready, "/ping": self.ping, "/model_info": 200}.get(self.path, 404))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format, *args):
        pass


def main():
    mode, words = sys.argv[1], sys.argv[2:]
    flags = {word: value for word, value in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}
    out = Path(os.environ["FAKE_OUT"])
    seen = {"pid": os.getpid(), "words": words, "env": dict(os.environ), "children": []}
    if "--config" in flags:
        file = Path(flags["--config"])
        seen["config"], seen["mode"] = json.loads(file.read_text()), oct(file.stat().st_mode & 0o777)
    if "children" in mode:
        # One that ends with nobody, in a session of its own, and whose parent ends at once.
        sleeps = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
        code = (
            "import subprocess, sys; "
            f"c = subprocess.Popen([sys.executable, '-c', {sleeps!r}], "
            "stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True); "
            "print(c.stdout.readline(), flush=True)"
        )
        orphan = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        direct = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        seen["children"] = [direct.pid, int(orphan.stdout)]
    if "stubborn" in mode:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "taken" in mode:
        # Another process got the port, but not the second time.
        count = Path(f"{out}.count")
        with count.open("a") as file:
            file.write(".")
        if count.stat().st_size < int(os.environ.get("FAKE_TAKEN", "2")):
            print("ERROR: [Errno 98] error while attempting to bind on address: address already in use", flush=True)
            sys.exit(1)
    if "raises" in mode:
        raise ValueError("no such flag; the key is " + seen.get("config", {}).get("api-key", ""))
    if "hangs" in mode:
        out.write_text(json.dumps(seen))
        time.sleep(600)
    if "paused" in mode:
        Answers.ready = 503
    if "mute" in mode:
        Answers.ready = Answers.ping = 503
    if "other" in mode:
        Answers.ready = 404
    server = HTTPServer((flags["--host"], int(flags["--port"])), Answers)
    out.write_text(json.dumps(seen))
    if "dies" in mode:
        server.timeout = 0.05
        while not Path(f"{out}.die").exists():
            server.handle_request()
        print("out of memory", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    server.serve_forever()


if __name__ == "__main__":
    main()
