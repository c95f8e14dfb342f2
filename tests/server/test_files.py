"""/v1/files, with the official client and with bodies that no client sends."""

import asyncio
import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import openai
import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.streams import StreamReader
from aiohttp.test_utils import make_mocked_request

from engine.settings.sections import ServerSection, StorageSection
from server.extensions.storage import routes
from server.extensions.storage.store import Store
from server.extensions.storage.uploads import received
from tests.server.http_client import RawClient, Reply, ask
from tests.server.live_server import LiveServer, connect

KEYS = ServerSection(api_key=["one-key", "another-key"], client_timeout_s=1.0)
MARK = "part"
# aiohttp warns of headers that it cannot read; here every warning is an error otherwise.
pytestmark = pytest.mark.filterwarnings("ignore::aiohttp.BadContentDispositionHeader")
MEGABYTE = 1 << 20


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setattr(routes, "MAX_FILE_BYTES", MEGABYTE)
    storage = StorageSection(folder=str(tmp_path), quota_mb=3)
    with LiveServer(server=KEYS, storage=storage) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with connect(server, "one-key") as client:
        yield client


def contents(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "store" / "contents").iterdir()]


def post(server: LiveServer, body: bytes, kind: str = f"multipart/form-data; boundary={MARK}", **more: str) -> Reply:
    headers = {"Authorization": "Bearer one-key", "Content-Type": kind, "Content-Length": str(len(body))}
    lines = [f"{name}: {value}" for name, value in {**headers, **more}.items()]
    head = "\r\n".join(["POST /v1/files HTTP/1.1", "Host: x", *lines]) + "\r\n\r\n"
    with RawClient(server.port) as raw:
        raw.send(head.encode() + body)
        return raw.read_reply()


def form(*parts: tuple[str, bytes]) -> bytes:
    """parts: (the rest of the disposition, the value)."""
    body = b"".join(
        f"--{MARK}\r\nContent-Disposition: form-data; {said}\r\n\r\n".encode() + value + b"\r\n"
        for said, value in parts
    )
    return body + f"--{MARK}--\r\n".encode()


PURPOSE = ('name="purpose"', b"batch")
FILE = ('name="file"; filename="in.jsonl"', b"{}\n")


def test_a_file_is_stored_listed_read_and_deleted(client: openai.OpenAI, tmp_path: Path) -> None:
    made = [client.files.create(file=(f"in{n}.jsonl", b"line\n" * n), purpose="batch") for n in range(1, 4)]
    assert [one.bytes for one in made] == [5, 10, 15]
    assert made[0].filename == "in1.jsonl"
    assert made[0].purpose == "batch"
    assert made[0].expires_at - made[0].created_at == 720 * 3600
    assert client.files.retrieve(made[1].id) == made[1]
    assert client.files.content(made[1].id).read() == b"line\n" * 2
    assert {one.id for one in client.files.list()} == {one.id for one in made}
    assert [one.id for one in client.files.list(limit=1)] == [one.id for one in client.files.list()]
    ascending = [one.id for one in client.files.list(order="asc")]
    assert ascending == [one.id for one in client.files.list(order="desc")][::-1]
    assert [one.id for one in client.files.list(order="asc", after=ascending[1]).data] == ascending[2:]
    assert client.files.list(purpose="batch_output").data == []
    assert client.files.delete(made[1].id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(made[1].id)
    assert sorted(contents(tmp_path)) == sorted({made[0].id, made[2].id})


def test_a_client_may_say_when_a_file_goes(client: openai.OpenAI) -> None:
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    made = client.files.create(file=b"x", purpose="batch", expires_after=expiry)
    assert made.expires_at - made.created_at == 3600
    for seconds in (1, 10**9, 10**30):
        with pytest.raises(openai.BadRequestError, match="expires_after"):
            client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": seconds})


def test_another_keys_files_are_not_there(server: LiveServer, client: openai.OpenAI) -> None:
    made = client.files.create(file=b"x", purpose="batch")
    with connect(server, "another-key") as other:
        assert other.files.list().data == []
        for call in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError) as caught:
                call(made.id)
            assert caught.value.code == "file_not_found"
        with pytest.raises(openai.NotFoundError):
            other.batches.create(input_file_id=made.id, endpoint="/v1/completions", completion_window="24h")
    assert client.files.retrieve(made.id) == made


@pytest.mark.parametrize("purpose", ["fine-tune", "assistants", "vision", "user_data", "batch_output", ""])
def test_other_purposes_are_refused_and_nothing_stays(client: openai.OpenAI, tmp_path: Path, purpose: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="files are taken for 'batch'"):
        client.files.create(file=b"x", purpose=purpose)
    assert contents(tmp_path) == []


def test_limits_of_size(client: openai.OpenAI, tmp_path: Path) -> None:
    for size in (MEGABYTE + 1, 2 * MEGABYTE):
        with pytest.raises(openai.APIStatusError, match=f"larger than {MEGABYTE} bytes") as caught:
            client.files.create(file=b"x" * size, purpose="batch")
        assert caught.value.status_code == 413
    kept = [client.files.create(file=b"x" * MEGABYTE, purpose="batch").id for _ in range(3)]
    with pytest.raises(openai.BadRequestError, match=r"storage\.quota_mb"):
        client.files.create(file=b"x", purpose="batch")
    assert sorted(contents(tmp_path)) == sorted(kept)


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (form(FILE), None, 400),
        (form(PURPOSE), None, 400),
        (form(PURPOSE, FILE, FILE), None, 400),
        (form(PURPOSE, *[('name="a"', b"")] * 40), None, 400),
        (form(PURPOSE, ('name="x"', b"y" * 5000)), None, 400),
        (form(("", b"x")), None, 400),
        (form(PURPOSE, FILE)[:-30], None, 400),
        (b"", None, 400),
        (b"\0" * 1000, None, 400),
        (form(PURPOSE, FILE), "multipart/form-data", 400),
        (form(PURPOSE, FILE), "multipart/form-data; boundary=" + "x" * 100, 400),
        (form(PURPOSE, FILE), "multipart/mixed; boundary=part", 415),
        (form(PURPOSE, FILE), "application/json", 415),
        (b"--part\r\n" + b"a: " + b"x" * 100_000 + b"\r\n\r\n--part--", None, 400),
        (b"--part\r\nContent-Type: multipart/mixed; boundary=q\r\n\r\n--q\r\n\r\nx\r\n--q--\r\n--part--", None, 400),
        (b"--part\r\nContent-Disposition: form-data; name=file\r\nContent-Length: -1\r\n\r\nx\r\n--part--", None, 400),
        (b"--part\r\nContent-Disposition: form-data; name=file\r\nContent-Length: z\r\n\r\nx\r\n--part--", None, 400),
    ],
)
def test_a_body_that_is_no_form_is_refused(
    server: LiveServer, tmp_path: Path, body: bytes, kind: str | None, status: int
) -> None:
    reply = post(server, body) if kind is None else post(server, body, kind)
    assert reply.status == status, reply
    assert reply.error["type"] == "invalid_request_error"
    assert contents(tmp_path) == []


@pytest.mark.parametrize("name", ["../../etc/passwd", "a\\..\\b", "\udcff", "x" * 3000, "", "\u202e", "..", "n\0ul"])
def test_a_files_name_is_only_told(server: LiveServer, name: str, tmp_path: Path) -> None:
    said = f'name="file"; filename="{name}"'.encode("utf-8", "surrogateescape")
    body = b"--part\r\nContent-Disposition: form-data; " + said + b"\r\n\r\nx\r\n" + form(PURPOSE)
    reply = post(server, body)
    if reply.status == 400:
        return
    assert reply.status == 200, reply
    assert contents(tmp_path) == [reply.json["id"]]
    assert not {"/", "\\", "\0"} & set(reply.json["filename"])
    assert len(reply.json["filename"]) <= 255


def test_a_slow_upload_is_cut_at_its_deadline(server: LiveServer, tmp_path: Path) -> None:
    with RawClient(server.port) as raw:
        raw.send(
            b"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer one-key\r\nContent-Length: 1000\r\n"
            b"Content-Type: multipart/form-data; boundary=part\r\n\r\n" + form(PURPOSE, FILE)[:150]
        )
        reply = raw.read_reply()
    assert (reply.status, reply.error["code"]) == (408, "body_timeout")
    assert contents(tmp_path) == []


def test_a_client_that_leaves_leaves_nothing(server: LiveServer, tmp_path: Path) -> None:
    with RawClient(server.port) as raw:
        raw.send(
            b"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer one-key\r\nContent-Length: 100000\r\n"
            b"Content-Type: multipart/form-data; boundary=part\r\n\r\n" + form(PURPOSE, FILE)[:150]
        )
        assert server.wait_until(lambda: contents(tmp_path) != [], 5)
    assert server.wait_until(lambda: contents(tmp_path) == [], 5)


async def test_a_client_that_leaves_while_the_file_is_opened_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = asyncio.Event()

    class Silent(StreamReader):
        async def readline(self, *, max_line_length: int | None = None) -> bytes:
            began.set()
            return await asyncio.Future()

    def slow(path: Path, mode: str, opened: Callable[..., IO[bytes]] = Path.open) -> IO[bytes]:
        began.set()
        time.sleep(0.05)
        return opened(path, mode)

    monkeypatch.setattr(Path, "open", slow)
    body = Silent(BaseProtocol(asyncio.get_running_loop()), 1 << 16, loop=asyncio.get_running_loop())
    kind = {"Content-Type": f"multipart/form-data; boundary={MARK}"}
    request = make_mocked_request("POST", "/v1/files", headers=kind, payload=body)

    async def upload() -> None:
        async with received(request, tmp_path / "content.part", ServerSection(), 100):
            pass

    task = asyncio.create_task(upload())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.get_running_loop().shutdown_default_executor()  # what threads began is done
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_is_507_and_nothing_stays(
    client: openai.OpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: IO[bytes]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/secret")

    kept = client.files.create(file=b"x", purpose="batch")
    with monkeypatch.context() as patch:
        patch.setattr(Store, "sync", staticmethod(full))
        with pytest.raises(openai.InternalServerError) as caught:
            client.files.create(file=b"y", purpose="batch")
    assert (caught.value.status_code, caught.value.code) == (507, "storage_full")
    assert "secret" not in str(caught.value)
    assert contents(tmp_path) == [kept.id]
    assert client.files.content(client.files.create(file=b"y", purpose="batch").id).read() == b"y"


def test_a_page_of_another_site_may_not_upload(server: LiveServer) -> None:
    reply = post(server, form(PURPOSE, FILE), **{"Sec-Fetch-Site": "cross-site"})
    assert (reply.status, reply.error["code"]) == (403, "foreign_page")


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=10001", "limit=%C2%B2", "order=up", "after=file-x"])
def test_a_list_that_cannot_be_given_is_said(server: LiveServer, query: str) -> None:
    reply = ask(server.port, "GET", f"/v1/files?{query}", headers={"Authorization": "Bearer one-key"})
    assert reply.status == (404 if query.startswith("after") else 400), reply


@pytest.mark.parametrize(
    "path", ["/v1/files", "/v1/files/file-x", "/v1/files/x/content", "/v1/batches", "/v1/batches/x"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "QUERY"])
def test_without_a_folder_a_404_says_what_turns_it_on(live: LiveServer, method: str, path: str) -> None:
    reply = ask(live.port, method, path)
    assert (reply.status, reply.error["code"]) == (404, "storage_off")
    assert "storage.folder" in reply.error["message"]
