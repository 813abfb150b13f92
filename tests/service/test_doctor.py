"""`adaptree doctor`, and `serve`, say the same about five troubles."""

import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from kernels.cpu import library
from service import doctor
from service.cli import app
from service.config import ServiceConfig
from service.engine.weights import gguf_file
from service.errors import StartupError
from service.serve import serve

_OPEN: list[socket.socket] = []


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    library.variant.cache_clear()
    yield
    library.variant.cache_clear()
    while _OPEN:
        _OPEN.pop().close()


Trouble = Callable[[Path, pytest.MonkeyPatch], ServiceConfig]


def no_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ServiceConfig:
    monkeypatch.setattr(library, "__file__", str(folder / "library.py"))
    return ServiceConfig(state_dir=folder)


def port_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ServiceConfig:
    other = socket.create_server(("127.0.0.1", 0))
    _OPEN.append(other)
    return ServiceConfig(state_dir=folder, port=other.getsockname()[1])


def state_dir_is_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ServiceConfig:
    (folder / "file").touch()
    return ServiceConfig(state_dir=folder / "file" / "state", port=0)


def model_cut_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ServiceConfig:
    whole = gguf_file("smollm2-135m")
    assert whole is not None
    shutil.copy(whole, folder / "cut.gguf")
    with (folder / "cut.gguf").open("r+b") as file:
        file.truncate(50_000_000)
    return ServiceConfig(state_dir=folder, model=str(folder / "cut.gguf"), port=0)


def little_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ServiceConfig:
    free = psutil.virtual_memory().available
    return ServiceConfig(state_dir=folder, kv_cache=f"{free // 2**30 + 8}GiB", port=0)


TROUBLES: list[tuple[Trouble, str, str]] = [
    (no_compiler, "processor", "install the wheel, or g++ and run `make install`"),
    (port_taken, "port", "Address already in use; stop the program that uses it, or choose another with --port"),
    (
        state_dir_is_a_file,
        "state_dir",
        "cannot be written: Not a directory; make it a folder that this user may write to",
    ),
    (model_cut_off, "model", "cut.gguf: this GGUF file is damaged or incomplete; copy or download it again"),
    (little_memory, "memory", "GiB of memory that are free: lower kv_cache"),
]


@pytest.mark.parametrize(("trouble", "subject", "words"), TROUBLES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_trouble_is_found_with_what_to_do(
    trouble: Trouble, subject: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = trouble(tmp_path, monkeypatch)
    problems = {one.subject: one.text for one in doctor.findings(config) if one.is_problem}
    assert problems.keys() == {subject}
    assert words in problems[subject]


@pytest.mark.parametrize(
    ("trouble", "subject", "words"), TROUBLES[1:], ids=lambda value: getattr(value, "__name__", "")
)
def test_a_start_ends_with_the_same_words(
    trouble: Trouble, subject: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StartupError) as raised:
        serve(trouble(tmp_path, monkeypatch))
    assert words in str(raised.value)


def test_a_server_that_has_the_port_is_asked_what_is_off(tmp_path: Path) -> None:
    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status": "ready", "switched_off": {"charge": 1700000000.5}}')

    with ThreadingHTTPServer(("127.0.0.1", 0), Ready) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = ServiceConfig(state_dir=tmp_path, port=server.server_port)
        (found,) = [one.text for one in doctor.findings(config) if one.subject == "port"]
        server.shutdown()
    assert "adaptree is running there, switched off after errors: charge (since 2023-11-1" in found


def test_a_sound_machine_has_no_problem(tmp_path: Path) -> None:
    sound = CliRunner().invoke(app, ["doctor", "--state-dir", str(tmp_path), "--port", "0"])
    assert sound.exit_code == 0, sound.output
    assert "no problem found" in sound.output
    found = {one.subject: one.text for one in doctor.findings(ServiceConfig(state_dir=tmp_path, port=0))}
    assert found["template"].startswith("turns in any order; system text anywhere; tools described in words")
    bad = CliRunner().invoke(app, ["doctor", "--state-dir", str(tmp_path), "--port", "0", "--model", "none.gguf"])
    assert bad.exit_code == 1
    assert "1 problem(s) to solve" in bad.output


def test_a_model_that_processes_share_is_checked_without_loading(tmp_path: Path) -> None:
    def found(size: int) -> doctor.Finding:
        config = ServiceConfig(state_dir=tmp_path, port=0, tensor_parallel=size)
        return next(one for one in doctor.findings(config) if one.subject == "device")

    assert "shared by 4 processes" in found(4).text
    assert found(3).is_problem
    assert "2, 4 or 8 devices" in found(3).text
