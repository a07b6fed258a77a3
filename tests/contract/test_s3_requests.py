"""What goes over the wire to an S3 server, counted by a proxy: a commit's price, and no listing."""

from __future__ import annotations

import tracemalloc
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast.storage import Storage, open_storage, probe
from holdfast.storage.s3.objects import S3Storage
from tests.conftest import TinyModel, make_optimizers, train_steps
from tests.s3proxy import Fate, Proxy, proxy_before
from tests.s3servers import BUCKET, Server


@pytest.fixture(params=["rclone", "moto"])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with proxy_before(server.port) as found:
        probe._found.clear()  # its port may have been another server's before
        yield found


def opened(server: Server, proxy: Proxy, **settings: float) -> Storage:
    url = f"s3://{BUCKET}/requests/{uuid.uuid4().hex}"
    return open_storage(url, **server.options(proxy.endpoint, **settings))


def requests_of(proxy: Proxy, storage: Storage) -> list[str]:
    """What passed since last time, without signs of life, as "PUT objects/..." """
    root = storage.url.removeprefix("s3://") + "/"
    taken = [label.replace(root, "") for label in proxy.take()]
    return [label for label in taken if not label.endswith(" .lease")]


def test_a_commit_costs_two_requests_beyond_the_data_and_lists_nothing(
    server: Server, proxy: Proxy
) -> None:
    storage = opened(server, proxy)
    torch.manual_seed(0)
    model = TinyModel()
    optimizers = make_optimizers(model, "adagrad")
    with hf.Checkpointer(storage, model=model, optimizer=optimizers, keep=2) as ck:
        ck.resume()
        for step in range(2):  # a writer that takes over looks at everything once
            train_steps(model, optimizers, range(step, step + 1), after=ck.step)
            ck.save().result()
        for step in range(2, 6):
            train_steps(model, optimizers, range(step, step + 1), after=ck.step)
            proxy.take()
            ck.save().result()
            ck.wait()
            sent = requests_of(proxy, storage)
            assert not [label for label in sent if "list-type" in label or "uploads" in label]
            kept = [label.split(" ?")[0] for label in sent if not label.startswith("DELETE")]
            data = [label for label in kept if " objects/" in label]
            commit = [label for label in kept if label not in data]
            number = ck._writer.catalog.number
            new, old = (f"catalog/{n:08d}.json" for n in (number, number - 1))
            if server.is_conditional:
                assert commit == [f"PUT {new}", f"HEAD {old}"]
                assert [label[:4] for label in data] == ["PUT "] * 2  # rows and dense state
            else:
                assert commit == [f"HEAD {new}", f"PUT {new}"]
                assert sorted(label[:4] for label in data) == ["HEAD"] * 2 + ["PUT "] * 2
            # Then what the commit no longer names is deleted, one by one.
            assert 1 <= len(sent) - len(kept) <= 4


def test_a_second_process_that_only_reads_writes_nothing(server: Server, proxy: Proxy) -> None:
    storage = opened(server, proxy)
    model = TinyModel()
    optimizers = make_optimizers(model, "sgd")
    with hf.Checkpointer(storage, model=model, optimizer=optimizers) as ck:
        ck.save().result()
    proxy.take()
    run = hf.open(storage.url, storage_options=server.options(proxy.endpoint))
    run.read(0, "users.weight", rows=[3, 5])
    assert hf.verify(storage.url, storage_options=server.options(proxy.endpoint)).is_sound
    assert {label.split()[0] for label in requests_of(proxy, storage)} <= {"GET", "HEAD"}


def test_a_read_asks_for_its_range_alone(server: Server, proxy: Proxy) -> None:
    storage = opened(server, proxy)
    storage.put_if_absent("a", bytes(range(256)))
    proxy.take()
    assert storage.get("a", offset=7, length=3) == b"\x07\x08\x09"
    assert requests_of(proxy, storage) == ["GET a"]


def test_the_probe_finds_out_what_the_server_does_and_leaves_nothing(
    server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_found", {})
    storage = opened(server, proxy)
    assert isinstance(storage, S3Storage)
    for _ in range(2):
        assert storage.is_conditional is server.is_conditional
    sent = requests_of(proxy, storage)
    verbs = [label.split()[0] for label in sent]
    if server.is_conditional:
        assert verbs == ["PUT", "PUT", "GET", "DELETE"]  # was it refused for our own earlier try?
    else:
        assert verbs == ["PUT", "PUT", "DELETE"] * 2
    root = storage.url.removeprefix(f"s3://{BUCKET}/")
    assert server.everything(root) == {}


def test_a_probe_that_another_process_cleans_away_is_made_again(
    moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_found", {})
    with proxy_before(moto.port) as proxy:
        storage = opened(moto, proxy)
        other = open_storage(storage.url, **moto.options())
        puts = 0

        def rule(request: str) -> Fate:
            nonlocal puts
            puts += request.startswith("PUT") and "/probe-" in request
            if puts == 2:
                puts += 1
                other.clean()
            return Fate.PASS

        proxy.rule = rule
        assert isinstance(storage, S3Storage)
        assert storage.is_conditional


def test_a_probe_that_is_cut_off_tells_nothing_and_is_made_again(
    server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_found", {})
    storage = opened(server, proxy, tries=2, retry_s=0.001)
    proxy.rule = lambda request: Fate.REFUSE
    with pytest.raises(hf.UnavailableError):
        storage.put_if_absent("catalog/1", b"x")
    proxy.rule = lambda request: Fate.PASS
    storage.put_if_absent("catalog/1", b"x")
    with pytest.raises(hf.ConflictError):
        storage.put_if_absent("catalog/1", b"y")
    assert isinstance(storage, S3Storage)
    assert storage.is_conditional is server.is_conditional
    storage.clean()
    root = storage.url.removeprefix(f"s3://{BUCKET}/")
    assert set(server.everything(root)) - {"/.lease"} == {"/catalog/1"}


@pytest.mark.parametrize("fate", [Fate.DEAF, Fate.BUSY, Fate.TEAR], ids=lambda fate: fate.name)
def test_a_put_whose_answer_is_lost_does_not_conflict_with_itself(
    server: Server, proxy: Proxy, fate: Fate
) -> None:
    storage = opened(server, proxy)
    storage.put_if_absent("catalog/0", b"first")
    root = storage.url.removeprefix("s3://")
    proxy.fail_next(fate, start=f"PUT {root}/catalog/1")
    storage.put_if_absent("catalog/1", b"x" * 5000)
    assert storage.get("catalog/1") == b"x" * 5000
    with pytest.raises(hf.ConflictError):
        storage.put_if_absent("catalog/1", b"y")
    assert storage.get("catalog/1") == b"x" * 5000


def test_a_completion_whose_answer_is_lost_is_found_out(server: Server, proxy: Proxy) -> None:
    storage = opened(server, proxy, part_bytes=1000)
    root = storage.url.removeprefix("s3://")
    # The first POST begins the upload, the second completes it.
    posts = iter([Fate.PASS, Fate.DEAF])
    proxy.rule = lambda request: (
        next(posts, Fate.PASS) if request.startswith(f"POST {root}") else Fate.PASS
    )
    with storage.create("objects/a") as writer:
        writer.write(b"0123456789" * 450)
        writer.close()
    assert storage.get("objects/a") == b"0123456789" * 450
    posted = [label for label in requests_of(proxy, storage) if label.startswith("POST")]
    assert len(posted) == 3


def test_an_upload_that_was_removed_is_said_to_be_gone(server: Server, proxy: Proxy) -> None:
    storage = opened(server, proxy, part_bytes=1000, tries=2)
    writer = storage.create("objects/a")
    writer.write(b"x" * 5000)
    for key in server.uploads(storage.url.removeprefix(f"s3://{BUCKET}/")):
        page = server.client.list_multipart_uploads(Bucket=BUCKET, Prefix=key)
        server.client.abort_multipart_upload(
            Bucket=BUCKET, Key=key, UploadId=page["Uploads"][0]["UploadId"]
        )
    # moto has an internal error instead of an answer for parts of an upload that it does not know
    said = "storage failed" if server.is_conditional else "upload is gone"
    with pytest.raises(hf.UnavailableError, match=said):
        writer.close()
    with pytest.raises(hf.NotFoundError):
        storage.size("objects/a")


def test_memory_for_a_large_object_is_a_few_parts(server: Server, tmp_path: Path) -> None:
    options = server.options(part_bytes=1 << 20, parts_at_once=2)
    storage = open_storage(f"s3://{BUCKET}/memory/{uuid.uuid4().hex}", **options)
    piece = bytes(1 << 18)
    with storage.create("small") as writer:  # what every writer needs is there
        writer.write(piece * 9)
        writer.close()
    tracemalloc.start()
    with storage.create("large") as writer:
        for _ in range(4 * 40):
            writer.write(piece)
        writer.close()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert storage.size("large") == 40 << 20
    assert peak < 8 << 20


def test_a_missing_bucket_is_named(server: Server) -> None:
    storage = open_storage("s3://no-such-bucket/run", **server.options())
    for act in (
        lambda: storage.put_if_absent("a", b"x"),
        lambda: storage.list(""),
    ):
        with pytest.raises(hf.InvalidRequestError, match="bucket does not exist"):
            act()


def test_wrong_credentials_are_named_and_not_shown(rclone: Server) -> None:
    options = {**rclone.options(), "secret": "hunter2-hunter2"}
    with pytest.raises(hf.UnavailableError, match="permission denied") as caught:
        open_storage(f"s3://{BUCKET}/run", **options).list("")
    assert "credentials" in str(caught.value) and "hunter2" not in str(caught.value)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(hf.InvalidRequestError, match="part_bytes"):
        open_storage("s3://bucket/run", holdfast={"parts": 3})
    with pytest.raises(hf.InvalidRequestError, match="tries must be"):
        open_storage("s3://bucket/run", holdfast={"tries": 0})
    with pytest.raises(hf.InvalidRequestError, match="settle_s"):
        open_storage("s3://bucket/run", holdfast={"lease_s": 1, "settle_s": 1})


def test_names_that_no_object_of_ours_has_are_not_listed(server: Server, proxy: Proxy) -> None:
    storage = opened(server, proxy)
    assert isinstance(storage, S3Storage)
    for name in ("objects/c1/a.hf", "objects/c1/a\\b.hf"):
        storage._bucket.put_once(name, b"x")
    assert [item.name for item in storage.list("objects/")] == ["objects/c1/a.hf"]
