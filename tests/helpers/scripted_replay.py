"""A replay that answers by a script, over a real socket."""

import threading

from asyncrl import wire
from asyncrl.transport.rendezvous import publish_address
from asyncrl.transport.sockets import Server


class Replay(threading.Thread):
    """Answers by a script: `answers(message)` is what to send back. Keeps what it heard."""

    def __init__(self, file, answers):
        super().__init__(daemon=True)
        self.server, self.answers, self.heard, self.over = Server("tcp://127.0.0.1:*"), answers, [], False
        publish_address(file, self.server.address)
        self.start()

    def run(self):
        while not self.over:
            for peer, frames in self.server.poll(0.02):
                message = wire.decode(frames)
                self.heard.append(message)
                for reply in self.answers(message):
                    self.server.send(peer, wire.encode(reply))
        self.server.close()

    def end(self):
        self.over = True
        self.join(10)


def plain(message):
    """What replay answers on a good day."""
    match message:
        case wire.Hello():
            return [wire.Welcome(0, 0, None, "b")]
        case wire.Commit(group_ids=ids, seq=seq):
            return [wire.Ack([], ids, seq)]
        case wire.Published(seq=seq) | wire.Done(seq=seq) | wire.Report(seq=seq):
            return [wire.Ack([], [], seq)]
    return []
