"""The key folder: what is made, who may read it, what is never overwritten, what is refused."""

import os

import pytest
import zmq

from asyncrl.errors import ConfigError
from asyncrl.transport import keys
from asyncrl.transport.allowlist import AllowList


def mode(path):
    return path.stat().st_mode & 0o777


def secret_of(file):
    return file.read_text().split()[1]


@pytest.fixture
def folder(tmp_path):
    keys.new(tmp_path / "keys", ["g0", "g1"])
    return tmp_path / "keys"


def test_new_makes_private_files(tmp_path):
    old = os.umask(0)
    try:
        made = keys.new(tmp_path / "a" / "keys")
    finally:
        os.umask(old)
    folder = tmp_path / "a" / "keys"
    names = ["server.pub", "server.key", "clients/client.key", "clients/client.pub", "allowed/client.pub"]
    assert made == [folder / n for n in names]
    assert [mode(file) for file in made] == [0o600] * 5
    assert [mode(d) for d in (folder, folder / "clients", folder / "allowed")] == [0o700] * 3


def test_each_side_reads_its_part(folder):
    server = keys.server_keys(folder)
    assert server.allowed == folder / "allowed"
    client = keys.client_keys("curve", folder, "g1")
    assert client.name == "g1" and client.server == zmq.curve_public(server.secret)
    assert client.public == zmq.curve_public(client.secret)
    assert keys.listed(folder) == [("g0", keys.client_keys("curve", folder, "g0").public), ("g1", client.public)]
    for security in ("loopback", "none"):
        assert keys.client_keys(security, folder, "g1") is None


def test_a_secret_is_never_shown(folder):
    secrets = [secret_of(folder / n) for n in ("server.key", "clients/g0.key")]
    shown = f"{keys.server_keys(folder)!r} {keys.client_keys('curve', folder, 'g0')!r}"
    assert not any(secret in shown for secret in secrets)


def test_nothing_is_overwritten(folder):
    def state():
        return {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()}

    before = state()
    # g2 is new, but the call is refused as a whole.
    for names in (["g0"], ["g2", "g1"]):
        with pytest.raises(ConfigError, match="never overwritten"):
            keys.new(folder, names)
    assert state() == before
    made = keys.new(folder, ["g2"])
    assert [f.name for f in made] == ["g2.key", "g2.pub", "g2.pub"]
    assert {f: text for f, text in state().items() if f in before} == before
    # A revoked client's secret is still there, and stays what it is.
    keys.revoke(folder, "g0")
    with pytest.raises(ConfigError, match="never overwritten"):
        keys.new(folder, ["g0"])


def test_a_client_elsewhere_hands_in_its_public_key(folder, tmp_path):
    made = keys.new(tmp_path / "mine", ["far"], folder / "server.pub")
    assert [f.relative_to(tmp_path / "mine").as_posix() for f in made] == [
        "server.pub", "clients/far.key", "clients/far.pub",
    ]  # fmt: skip
    assert keys.add(folder, made[2]) == folder / "allowed" / "far.pub"
    mine = keys.client_keys("curve", tmp_path / "mine", "far")
    assert ("far", mine.public) in keys.listed(folder)
    assert mine.server == keys.client_keys("curve", folder, "g0").server
    with pytest.raises(ConfigError, match="'far', which is allowed already"):
        keys.add(folder, made[2], "other")
    with pytest.raises(ConfigError, match="no server's key folder"):
        keys.add(tmp_path / "mine", folder / "clients" / "g0.pub")
    with pytest.raises(ConfigError, match=r"server\.pub exists"):
        keys.new(tmp_path / "mine", ["second"], folder / "server.pub")
    with pytest.raises(ConfigError, match="holds a secret key where a public key belongs"):
        keys.add(folder, tmp_path / "mine" / "clients" / "far.key", "leak")


def test_revoking_removes_one_file(folder):
    keys.revoke(folder, "g0")
    assert [name for name, _ in keys.listed(folder)] == ["g1"]
    with pytest.raises(ConfigError, match=r"g0\.pub' does not exist; allowed are: g1|g0\.pub does not exist"):
        keys.revoke(folder, "g0")
    keys.add(folder, folder / "clients" / "g0.pub")
    assert [name for name, _ in keys.listed(folder)] == ["g0", "g1"]


@pytest.mark.parametrize("name", ["", ".", "../g0", "a/b", ".hidden", "-x", "x" * 101, "g\n0"])
def test_odd_names_are_refused(folder, name):
    for use in (keys.revoke, lambda d, n: keys.new(d, [n]), lambda d, n: keys.client_keys("curve", d, n)):
        with pytest.raises(ConfigError, match="client name"):
            use(folder, name)


def test_what_others_could_read_or_change_is_refused(folder):
    (folder / "server.key").chmod(0o640)
    with pytest.raises(ConfigError, match=r"server\.key' can be read by other users; chmod 600 "):
        keys.server_keys(folder)
    (folder / "server.key").chmod(0o400)
    for place in (folder / "allowed", folder):
        place.chmod(0o770)
        with pytest.raises(ConfigError, match="can be changed by other users; chmod 700 "):
            keys.server_keys(folder)
        place.chmod(0o700)
    assert keys.server_keys(folder)
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod 700"):
        keys.new(folder, ["g9"])
    folder.chmod(0o700)


def test_what_is_missing_is_named_with_its_remedy(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"replay\.security=curve needs replay\.keys; .*asyncrl keys new DIR"):
        keys.server_keys(None)
    with pytest.raises(ConfigError, match=r"weights\.keys='.*nowhere' is no folder; .*asyncrl keys new"):
        keys.server_keys(tmp_path / "nowhere", "weights.keys")
    with pytest.raises(ConfigError, match=r"no key pair of client 'g7'; set replay\.client to one of: g0, g1"):
        keys.client_keys("curve", folder, "g7")
    (folder / "server.key").unlink()
    with pytest.raises(ConfigError, match=r"has no server\.key.*asyncrl keys new"):
        keys.server_keys(folder)
    keys.check(folder, "g0")  # still a client's folder
    with pytest.raises(ConfigError, match="no key pair of client 'g7'"):
        keys.check(folder, "g7")


@pytest.mark.parametrize("text", ["", "asyncrl-secret short\n", "x" * 300, "asyncrl-secret " + "~" * 40, "#" * 40])
def test_a_file_that_holds_no_key_is_refused(folder, text):
    (folder / "server.key").write_text(text)
    with pytest.raises(ConfigError, match=r"server\.key' does not hold a key") as caught:
        keys.server_keys(folder)
    assert not text or text.strip() not in str(caught.value)


def test_the_allow_list_follows_its_folder(folder, caplog):
    allow = AllowList(folder / "allowed")
    g0, g1 = (keys.client_keys("curve", folder, n).public for n in ("g0", "g1"))
    assert allow.names == {g0: "g0", g1: "g1"}
    keys.revoke(folder, "g0")
    allow.refresh()
    assert allow.names == {g1: "g1"} and allow.former[g0] == "g0"
    keys.add(folder, folder / "clients" / "g0.pub", "again")
    # A file that is no key allows nobody, is logged once, and does no harm to the others.
    (folder / "allowed" / "broken.pub").write_text("not a key")
    allow.refresh()
    allow.refresh()
    assert allow.names == {g0: "again", g1: "g1"}
    assert caplog.text.count("broken.pub") == 1
    # The same file with another key in it is another client.
    (folder / "allowed" / "g1.pub").write_bytes((folder / "server.pub").read_bytes())
    os.utime(folder / "allowed" / "g1.pub", ns=(1, 1))
    allow.refresh()
    assert g1 not in allow.names
    # Without its folder it allows nobody, and says so once.
    (folder / "allowed").rename(folder / "away")
    allow.refresh()
    allow.refresh()
    assert allow.names == {} and caplog.text.count("nobody is allowed") == 1


def test_the_list_of_no_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no key folder of a server; make it with `asyncrl keys new"):
        keys.listed(tmp_path / "none")
