"""The artifact stores: one suite over the local folder, the memory and a server of S3's protocol."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

import obstore.exceptions
import obstore.store
import pytest

from postroom.app import artifacts_for, one_core, open_room
from postroom.domain.ids import CoreId
from postroom.errors import (
    ArtifactCorrupt,
    ArtifactMissing,
    ConfigError,
    StoreError,
    StoreFull,
    StoreReadOnly,
)
from postroom.flow.core import Core
from postroom.ports.artifact import ArtifactStore
from postroom.stores.artifacts import LocalArtifacts, open_artifacts
from postroom.stores.artifacts_bytes import TRANSLATED, artifact_id
from postroom.stores.artifacts_object import Bucket, parse_bucket
from postroom.testing import scripted
from tests.servers.s3 import BUCKET, s3_server
from tests.support import bounded

__all__ = ["s3_server"]

CORE = Core(id=CoreId("default"), revision="1", models=(scripted("hello"),))
ABSENT = "sha256:" + "0" * 64


@pytest.fixture
def bucket(s3_server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a place of the test's own in a bucket; its credentials are in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    place = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]
    return f"s3://{BUCKET}/postroom/{place}?endpoint={s3_server}&region=us-east-1"


@pytest.fixture(params=["folder", "memory", "s3", "s3 without conditional put"])
def artifacts(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    if request.param == "folder":
        return open_artifacts(tmp_path / "artifacts")
    if request.param == "memory":
        return open_artifacts("memory://")
    without = "&conditional_put=disabled" if request.param != "s3" else ""
    return open_artifacts(request.getfixturevalue("bucket") + without)


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


@pytest.mark.parametrize("place", ["folder", "s3"])
@pytest.mark.parametrize("wrong", [b"the wrong bytes", b"others"])
async def test_damaged_bytes_are_refused_and_the_next_put_replaces_them(
    tmp_path: Path, request: pytest.FixtureRequest, place: str, wrong: bytes
) -> None:
    url = str(tmp_path) if place == "folder" else request.getfixturevalue("bucket")
    artifacts = open_artifacts(url)
    artifact = await artifacts.put(b"the right bytes")
    digits = artifact.removeprefix("sha256:")
    if place == "folder":
        (tmp_path / digits[:2] / digits).write_bytes(wrong)
    else:
        found = parse_bucket(url, {})
        past = obstore.store.S3Store(
            found.name,
            endpoint=str(found.endpoint),
            region=str(found.region),
            client_options={"allow_http": True},
        )
        past.put(f"{found.prefix}/{digits[:2]}/{digits}", wrong)
    with pytest.raises(ArtifactCorrupt, match=artifact):
        await artifacts.get(artifact)
    await artifacts.put(b"the right bytes")
    assert await artifacts.get(artifact) == b"the right bytes"


async def test_a_link_in_the_folder_leads_to_no_other_file(tmp_path: Path) -> None:
    root, secret = tmp_path / "artifacts", tmp_path / "secret"
    secret.write_bytes(b"not for the agent")
    digits = ABSENT.removeprefix("sha256:")
    (root / digits[:2]).mkdir(parents=True)
    (root / digits[:2] / digits).symlink_to(secret)
    with pytest.raises(ArtifactCorrupt) as caught:
        await open_artifacts(root).get(ABSENT)
    assert "agent" not in str(caught.value)


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


SECRETS = (
    "s3://key:very-secret@bucket",
    "s3://bucket/x?endpoint=http://key:very-secret@host",
    "s3://bucket/x?endpoint=http://key:very-secret%40host",
    "s3://bucket/x?secret_access_key=very-secret",
    "s3://bucket/x?very-secret",
)


@pytest.mark.parametrize("url", ["ftp://host/x", "gs://bucket", "file://relative", *SECRETS])
def test_a_store_of_another_kind_is_refused_without_repeating_its_secrets(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_artifacts(url)
    assert "very-secret" not in f"{caught.value!r} {caught.value}"


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3://bucket:80/x",
        "s3://a/x",
        "s3://bucket/../x",
        "s3://bucket/x/%2e%2e/y",
        "s3://bucket/x//y",
        "s3://bucket/x%00y",
        "s3://bucket/x#y",
        "s3://bucket/x?region=a&region=b",
        "s3://bucket/x?region=%0a",
        "s3://bucket/x?endpoint=nonsense",
        "s3://bucket/x?endpoint=ftp://host",
        "s3://bucket/x?endpoint=http://host:99999",
        "s3://bucket/x?endpoint=http://host/a?b",
        "s3://bucket/x?conditional_put=perhaps",
        "s3://bucket/x?colour=red",
        "file:///x?y=z",
        "file:///x%00",
        "file://host/x",
    ],
)
def test_a_url_that_names_no_safe_place_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        open_artifacts(url)


def test_a_store_shows_where_it_is_and_no_credentials(bucket: str, s3_server: str) -> None:
    shown = repr(open_artifacts(bucket))
    place = bucket.partition("?")[0]
    assert shown == f"ObjectArtifacts('{place} at {s3_server}')"


def test_what_a_url_leaves_open_is_in_the_environment() -> None:
    environ = {"AWS_ENDPOINT_URL": "https://other:9000", "AWS_REGION": "eu-1"}
    assert parse_bucket("s3://bucket", environ) == Bucket(
        "bucket", endpoint="https://other:9000", region="eu-1"
    )
    url = "s3://bucket/a/b/?endpoint=https://here:9000/&region=us-2&conditional_put=disabled"
    assert parse_bucket(url, environ) == Bucket(
        "bucket", "a/b", "https://here:9000/", "us-2", conditional=False
    )
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        with pytest.raises(ConfigError, match="endpoint"):
            parse_bucket("s3://bucket", {name: "nonsense"})


async def test_the_url_s_endpoint_wins_over_the_environment_s(
    bucket: str, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{unused_tcp_port}")
    artifacts = open_artifacts(bucket)
    assert await bounded(artifacts.exists(await artifacts.put(b"here")))


async def test_two_places_of_one_bucket_know_nothing_of_each_other(bucket: str) -> None:
    other = bucket.replace("?", "/other?")
    artifact = await open_artifacts(bucket).put(b"mine")
    assert not await open_artifacts(other).exists(artifact)
    assert await open_artifacts(bucket).exists(artifact)


async def test_a_bucket_that_is_not_there_is_no_missing_artifact(bucket: str) -> None:
    artifacts = open_artifacts(bucket.replace(f"s3://{BUCKET}/", "s3://no-such-bucket/"))
    for attempt in (artifacts.put(b"data"), artifacts.get(ABSENT)):
        with pytest.raises(StoreError, match="NoSuchBucket") as caught:
            await bounded(attempt)
        assert not isinstance(caught.value, ArtifactMissing)
        assert "<" not in str(caught.value)


async def test_a_server_that_never_answers_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("postroom.stores.artifacts_object.RETRIES_MAX", 1)
    monkeypatch.setattr("postroom.stores.artifacts_object.REQUEST_MS", 100)
    environ = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    calls: list[int] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.append(1)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        artifacts = open_artifacts(f"s3://bucket?endpoint=http://127.0.0.1:{port}", environ)
        for attempt in (artifacts.put(b"data"), artifacts.get(ABSENT)):
            with pytest.raises(StoreError):
                await bounded(attempt, 20)
    assert 2 <= len(calls) <= 4


async def test_an_s3_server_that_is_not_there_is_a_store_error_with_no_secret_in_it(
    monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    monkeypatch.setattr("postroom.stores.artifacts_object.RETRIES_MAX", 0)
    environ = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{unused_tcp_port}",
        "AWS_ACCESS_KEY_ID": "test-key-id",
        "AWS_SECRET_ACCESS_KEY": "very-secret",
    }
    with pytest.raises(StoreError) as caught:
        await bounded(open_artifacts("s3://bucket", environ).put(b"data"), 20)
    assert "very-secret" not in repr(caught.value) + str(caught.value)


def test_a_credential_that_cannot_be_one_is_refused_unseen() -> None:
    environ = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "very-secret\n"}
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY") as caught:
        open_artifacts("s3://bucket", environ)
    assert "very-secret" not in str(caught.value)


# Which store a room uses


async def test_the_environment_names_the_store_and_without_it_a_folder_beside_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTROOM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("POSTROOM_ARTIFACTS", raising=False)
    database = str(tmp_path / "postroom.db")
    async with open_room(one_core(CORE), database=database, drive=False) as room:
        artifact = await room.artifacts.put(b"beside")
    digits = artifact.removeprefix("sha256:")
    assert (tmp_path / "postroom.db-artifacts" / digits[:2] / digits).is_file()

    monkeypatch.setenv("POSTROOM_ARTIFACTS", str(tmp_path / "named"))
    async with open_room(one_core(CORE), database=database, drive=False) as room:
        await room.artifacts.put(b"beside")
    assert (tmp_path / "named" / digits[:2] / digits).is_file()

    monkeypatch.setenv("POSTROOM_ARTIFACTS", "gs://bucket")
    with pytest.raises(ConfigError):
        async with open_room(one_core(CORE), database=database, drive=False):
            raise AssertionError("no room is opened without its artifacts")


async def test_the_home_s_env_file_may_hold_the_credentials_of_the_store(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("POSTROOM_HOME", str(tmp_path))
    (tmp_path / ".env").write_text(
        f"POSTROOM_ARTIFACTS={bucket}\nAWS_ACCESS_KEY_ID=k\nAWS_SECRET_ACCESS_KEY=s\n"
    )
    artifacts = artifacts_for(str(tmp_path / "postroom.db"))
    assert await artifacts.get(await artifacts.put(b"data")) == b"data"
