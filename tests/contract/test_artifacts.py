"""The artifact stores: one suite over the local folder, the memory and a real S3 protocol."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import obstore.exceptions
import obstore.store
import pytest

from postroom.errors import (
    ArtifactCorrupt,
    ArtifactMissing,
    ConfigError,
    StoreError,
    StoreFull,
    StoreReadOnly,
)
from postroom.ports.artifact import ArtifactStore
from postroom.stores.artifacts import TRANSLATED, LocalArtifacts, artifact_id, open_artifacts
from tests.support import bounded

ABSENT = "sha256:" + "0" * 64


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    """The URL of an S3 server on the loopback, with a bucket named ``bucket``."""
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    try:
        url = ""
        for line in server.stderr:
            if found := re.search(r"Running on (http://[\d.:]+)", line):
                url = found[1]
                break
        assert url, "the S3 server did not start"
        request = urllib.request.Request(f"{url}/bucket", method="PUT")
        with urllib.request.urlopen(request, timeout=10):
            pass
        yield url
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


@pytest.fixture(params=["folder", "memory", "s3"])
def artifacts(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ArtifactStore:
    if request.param == "folder":
        return open_artifacts(tmp_path / "artifacts")
    if request.param == "memory":
        return open_artifacts("memory://")
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_endpoint"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return open_artifacts(f"s3://bucket/{request.node.name}")


async def test_what_was_put_is_got_by_its_hash(artifacts: ArtifactStore) -> None:
    data = os.urandom(100_000)
    artifact = await artifacts.put(data)
    assert artifact == "sha256:" + hashlib.sha256(data).hexdigest() == artifact_id(data)
    assert await artifacts.get(artifact) == data
    assert await artifacts.exists(artifact)


async def test_no_bytes_at_all_are_an_artifact_too(artifacts: ArtifactStore) -> None:
    assert await artifacts.get(await artifacts.put(b"")) == b""


async def test_an_artifact_larger_than_one_part_of_an_upload_is_kept_whole(
    artifacts: ArtifactStore,
) -> None:
    data = os.urandom(1024) * 8 * 1024
    assert await artifacts.get(await artifacts.put(data)) == data


async def test_the_same_bytes_put_again_and_at_once_are_one_artifact(
    artifacts: ArtifactStore,
) -> None:
    ids = await bounded(asyncio.gather(*(artifacts.put(b"the same") for _ in range(20))))
    assert set(ids) == {artifact_id(b"the same")}
    assert await artifacts.put(b"the same") == ids[0]
    assert await artifacts.get(ids[0]) == b"the same"


async def test_a_missing_artifact_is_a_typed_store_error(artifacts: ArtifactStore) -> None:
    with pytest.raises(ArtifactMissing, match=ABSENT) as caught:
        await artifacts.get(ABSENT)
    assert isinstance(caught.value, StoreError)
    assert not await artifacts.exists(ABSENT)


@pytest.mark.parametrize("wrong", ["", "sha256:../../etc/passwd", "sha256:" + "A" * 64, "md5:0"])
async def test_what_is_no_artifact_id_reaches_no_path(artifacts: ArtifactStore, wrong: str) -> None:
    with pytest.raises(ArtifactMissing):
        await artifacts.get(wrong)
    assert not await artifacts.exists(wrong)


async def test_a_deleted_artifact_is_gone_and_may_be_deleted_again(
    artifacts: ArtifactStore,
) -> None:
    artifact = await artifacts.put(b"short-lived")
    await artifacts.delete(artifact)
    await artifacts.delete(artifact)
    assert not await artifacts.exists(artifact)
    with pytest.raises(ArtifactMissing):
        await artifacts.get(artifact)
    assert await artifacts.put(b"short-lived") == artifact
    assert await artifacts.get(artifact) == b"short-lived"


async def test_damaged_bytes_are_refused_and_the_next_put_replaces_them(tmp_path: Path) -> None:
    artifacts = LocalArtifacts(tmp_path)
    artifact = await artifacts.put(b"the right bytes")
    digits = artifact.removeprefix("sha256:")
    (tmp_path / digits[:2] / digits).write_bytes(b"the wrong bytes")
    with pytest.raises(ArtifactCorrupt, match=artifact):
        await artifacts.get(artifact)
    await artifacts.put(b"the right bytes")
    assert await artifacts.get(artifact) == b"the right bytes"


async def test_a_put_syncs_the_file_and_every_name_on_the_way_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def recording(fd: int) -> None:
        synced.append(os.path.realpath(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", recording)
    root = tmp_path / "made" / "artifacts"
    artifacts = open_artifacts(f"file://{root}")
    digits = (await artifacts.put(b"durable")).removeprefix("sha256:")
    shard = root / digits[:2]
    expected = [tmp_path, root.parent, shard / digits, shard, root]
    assert synced == [str(path) for path in expected]

    # Whoever finds the bytes there may be ahead of the one who wrote them: it syncs as well.
    synced.clear()
    await open_artifacts(root).put(b"durable")
    assert synced == [str(path) for path in expected[2:]]


async def test_the_folder_is_for_its_owner_alone_and_no_temporary_file_stays(
    tmp_path: Path,
) -> None:
    root = tmp_path / "artifacts"
    artifacts = LocalArtifacts(root)
    await asyncio.gather(*(artifacts.put(b"%d" % (n % 3)) for n in range(12)))
    assert root.stat().st_mode & 0o777 == 0o700
    files = [path for path in root.rglob("*") if path.is_file()]
    assert len(files) == 3
    assert all(len(path.name) == 64 for path in files)


async def test_reading_from_a_folder_that_was_never_made_makes_none(tmp_path: Path) -> None:
    artifacts = LocalArtifacts(tmp_path / "none")
    with pytest.raises(ArtifactMissing):
        await artifacts.get(ABSENT)
    assert not await artifacts.exists(ABSENT)
    await artifacts.delete(ABSENT)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("number", "expected"), [(28, StoreFull), (122, StoreFull), (30, StoreReadOnly)]
)
async def test_a_full_and_a_read_only_disk_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[StoreError]
) -> None:
    def fails(*_args: object, **_kwargs: object) -> None:
        raise obstore.exceptions.GenericError(
            f"Generic LocalFileSystem error: it failed (os error {number})\n\nDebug source:\n…"
        )

    monkeypatch.setattr(obstore.store.LocalStore, "put", fails)
    with pytest.raises(expected) as caught:
        await LocalArtifacts(tmp_path).put(b"data")
    assert "Debug" not in str(caught.value)


async def test_a_root_that_is_a_file_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError):
        await LocalArtifacts(tmp_path / "file").put(b"data")


def test_every_exception_of_the_library_has_its_place_in_the_table() -> None:
    theirs = {
        name
        for name, value in vars(obstore.exceptions).items()
        if isinstance(value, type) and issubclass(value, Exception) and name != "BaseError"
    }
    assert theirs - TRANSLATED.keys() == set()


@pytest.mark.parametrize(
    "url", ["ftp://host/x", "gs://bucket", "file://relative", "s3://key:very-secret@bucket"]
)
def test_a_store_of_another_kind_is_refused_without_repeating_its_secrets(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_artifacts(url)
    assert "very-secret" not in str(caught.value)


async def test_an_s3_server_that_is_not_there_is_a_store_error_with_no_secret_in_it(
    monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    monkeypatch.setattr("postroom.stores.artifacts.RETRIES_MAX", 0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused_tcp_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with pytest.raises(StoreError) as caught:
        await bounded(open_artifacts("s3://bucket").put(b"data"), 20)
    assert "very-secret" not in repr(caught.value) + str(caught.value)
