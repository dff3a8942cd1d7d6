"""Models on this machine, in this process: llama.cpp through xllamacpp (the extra ``local``).

The library runs its work in threads of its own and gives Python's lock back while it does, so the
event loop goes on while a model thinks. There is one exception: while weights are loaded, at the
first request, everything in this process stands still (about a second for half a gigabyte).

One *engine* holds weights in memory for all models of this process that name them. It answers one
request at a time, in the order they came; a second at the same time would only make both slower.
It uses all cores but one.

The library cannot be without a listening server. It is given a socket file that is deleted once
it is open, and a key that nobody knows: nothing can reach it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec

from postroom.domain.message import Finish, Usage
from postroom.errors import ConfigError, ModelError, ModelErrorKind
from postroom.models import weights
from postroom.models.small import Answer, body_of
from postroom.ports.model import DeltaSink, ModelRequest, Reply

LIBRARY = "xllamacpp"
IDLE_TIMEOUT_MS = 120_000
# Prompts are read so many tokens at a time; a cancel is noticed in between.
BATCH_TOKENS = 128
# Conversations that were read already are kept, so that going on with one reads only what is new.
KEPT_MIB = 256

_INSTALL = "pip install 'postroom[local]'"


class LocalModel:
    """A model from a GGUF file. ``ref`` is ``local:NAME`` as asked for.

    ``window`` is in tokens. ``idle_timeout_ms``: a request fails when the engine gets nowhere for
    so long. Nothing is loaded before the first request.
    """

    def __init__(
        self,
        ref: str,
        path: Path,
        *,
        window: int = 8192,
        idle_timeout_ms: int = IDLE_TIMEOUT_MS,
    ) -> None:
        self._ref = ref
        self._path = path
        self._window = window
        self._idle_s = idle_timeout_ms / 1000
        self._engine: Engine | None = None
        self._closed = False
        self._jobs: set[Job] = set()

    @property
    def ref(self) -> str:
        return self._ref

    @property
    def window(self) -> int | None:
        return self._window

    @property
    def accepts(self) -> frozenset[str]:
        return frozenset()

    def render(self, request: ModelRequest) -> bytes:
        return body_of(request)

    async def respond(self, request: ModelRequest, on_delta: DeltaSink) -> Reply:
        if self._closed:
            raise ModelError(f"{self._ref} is closed", kind="transport")
        if self._engine is None:
            self._engine = Engine.of(self._path, self._window)
        engine = self._engine
        job = Job(self.render(request))
        self._jobs.add(job)
        engine.start(job)
        try:
            return await self._read(engine, job, Answer(request), on_delta)
        finally:
            job.cancel()
            self._jobs.discard(job)

    async def aclose(self) -> None:
        """Stops what is being generated and frees the weights, if no other model uses them."""
        self._closed = True
        for job in self._jobs:
            job.cancel()
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.shield(asyncio.to_thread(engine.release))

    async def _read(self, engine: Engine, job: Job, answer: Answer, on_delta: DeltaSink) -> Reply:
        """Reads the stream to its end and puts the reply together."""
        finish: Finish | None = None
        usage = Usage()
        request_id: str | None = None
        while (data := await self._next(engine, job)) is not None:
            try:
                chunk = _decode(data)
            except msgspec.DecodeError as error:
                raise ModelError(
                    f"{self._ref} said what is no chunk of a completion", kind="server"
                ) from error
            if chunk.error is not None:
                raise self._failure(chunk.error)
            request_id = chunk.id or request_id
            if chunk.usage is not None:
                usage = chunk.usage.counted()
            for choice in chunk.choices[:1]:
                if choice.delta.reasoning_content:
                    _tell(answer.think(choice.delta.reasoning_content), on_delta)
                if choice.delta.content:
                    _tell(answer.say(choice.delta.content), on_delta)
                if choice.finish_reason is not None:
                    finish = "length" if choice.finish_reason == "length" else "stop"
        if finish is None:
            raise ModelError(f"{self._ref} stopped before its reply was whole", kind="transport")
        _tell(answer.end(), on_delta)
        return answer.reply(finish, usage, self._ref.partition(":")[2], request_id)

    async def _next(self, engine: Engine, job: Job) -> str | None:
        """The next piece of the stream; None: it has ended."""
        while True:
            try:
                async with asyncio.timeout(self._idle_s):
                    return await job.next()
            except TimeoutError:
                # While others are served before it, a request waits.
                if time.monotonic() - engine.moved < self._idle_s:
                    continue
                raise ModelError(
                    f"{self._ref} got nowhere for {self._idle_s:.0f} s", kind="timeout"
                ) from None
            except LoadFailed as error:
                raise ModelError(
                    f"{self._ref} cannot be loaded from {self._path}: {error}",
                    kind="bad_request",
                    hint="if the file is damaged, remove and install the model again",
                ) from error
            except RuntimeError as error:
                raise ModelError(f"{self._ref} failed: {error}", kind="server") from error

    def _failure(self, error: _Error) -> ModelError:
        kind: ModelErrorKind = "server"
        if error.type == "exceed_context_size_error":
            kind = "context_overflow"
        elif 400 <= error.code < 500:
            kind = "bad_request"
        return ModelError(f"{self._ref}: {error.message}", kind=kind, status=error.code)


def _tell(deltas: list[Any], on_delta: DeltaSink) -> None:
    for delta in deltas:
        on_delta(delta)


# ---- what the library streams ----


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details = msgspec.field(default_factory=_Details)

    def counted(self) -> Usage:
        return Usage(
            self.prompt_tokens,
            self.completion_tokens,
            self.prompt_tokens_details.cached_tokens,
        )


class _Error(msgspec.Struct):
    code: int = 500
    message: str = "an error without a word"
    type: str = ""


class _Chunk(msgspec.Struct):
    id: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


# ---- one request, between the loop and the engine's thread ----


class Job:
    """One body to be answered. Made on the event loop that reads its stream."""

    def __init__(self, body: bytes) -> None:
        self.body = body.decode()
        self._loop = asyncio.get_running_loop()
        self._stream: asyncio.Queue[str | Exception | None] = asyncio.Queue()
        self._cancelled = False

    async def next(self) -> str | None:
        """The next piece of the stream; None at its end. Raises what ended it."""
        item = await self._stream.get()
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        self._cancelled = True

    @property
    def cancelled(self) -> bool:
        """Also where nobody is left to read: the process is about to end."""
        return self._cancelled or not threading.main_thread().is_alive()

    def put(self, item: str | Exception | None) -> None:
        """Passes on a piece, from the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._stream.put_nowait, item)
        except RuntimeError:
            self._cancelled = True  # the loop is closed


# ---- the weights in memory ----


class LoadFailed(Exception):
    """The library could not make a model of the file."""


class Server(Protocol):
    """The part of the library's server that is used. The callback stops it by returning True."""

    def handle_chat_completions(self, body: str, callback: Callable[[str], bool]) -> object: ...

    def handle_completions(self, body: str, callback: Callable[[str], bool]) -> object: ...


class Engine:
    """Weights in memory, and the one thread that hands them requests.

    ``moved`` is when it last got further, on the monotonic clock in seconds.
    """

    _all: dict[tuple[Path, int], Engine] = {}  # noqa: RUF012
    _lock = threading.Lock()

    def __init__(self, path: Path, window: int) -> None:
        self._path = path
        self._window = window
        self._users = 0
        self._server: Server | None = None
        self._interrupted = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="postroom-local")
        self.moved = time.monotonic()

    @classmethod
    def of(cls, path: Path, window: int) -> Engine:
        """The engine of these weights, made if there is none. Each caller releases it once."""
        key = (path.resolve(), window)
        with cls._lock:
            engine = cls._all.get(key)
            if engine is None:
                engine = cls._all[key] = Engine(*key)
            engine._users += 1
            return engine

    def release(self) -> None:
        """Blocks until nothing of it is left, if this was the last user."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            del self._all[self._path, self._window]
        self._thread.submit(self._free)
        self._thread.shutdown(wait=True)

    def start(self, job: Job) -> Future[None]:
        """Queues a request behind those that are there."""
        return self._thread.submit(self._answer, job)

    def _answer(self, job: Job) -> None:
        def take(data: str) -> bool:
            self.moved = time.monotonic()
            job.put(data)
            self._interrupted = job.cancelled
            return self._interrupted

        self.moved = time.monotonic()
        try:
            if not job.cancelled:
                self._loaded().handle_chat_completions(job.body, take)
        except Exception as error:
            job.put(error)
        else:
            job.put(None)

    def _loaded(self) -> Server:
        if self._server is None:
            self._server = _load(self._path, self._window)
            self.moved = time.monotonic()
        return self._server

    def _free(self) -> None:
        # The library holds Python's lock while it frees, and first ends the batch it is at. Where
        # a request was broken off, one more token is asked for: that waits without the lock.
        if self._server is not None and self._interrupted:
            self._server.handle_completions(_ONE_TOKEN, lambda _: True)
        self._server = None


_ONE_TOKEN = '{"prompt": ".", "max_tokens": 1}'


def _load(path: Path, window: int) -> Server:
    """Opens the weights.

    Raises:
        LoadFailed: the library is missing or does not take the file.
    """
    if not path.is_file():
        raise LoadFailed("there is no such file")
    try:
        library: Any = importlib.import_module(LIBRARY)
    except ImportError as error:
        raise LoadFailed(str(error)) from error
    private = tempfile.mkdtemp(prefix="postroom-")
    try:
        params = library.CommonParams()
        params.model.path = str(path)
        # A window is shared out among the requests served at once: one.
        params.n_ctx = window
        params.n_parallel = 1
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = max(1, _cores() - 1)
        params.cache_ram_mib = KEPT_MIB
        # Shorter standstill while it loads; generating is as fast.
        params.warmup = False
        params.fit_params = False
        params.no_extra_bufts = True
        # An answer begun by somebody else is not gone on with.
        params.prefill_assistant = False
        params.verbosity = 0
        params.hostnames = [os.path.join(private, "unused.sock")]
        params.api_keys = [secrets.token_hex(32)]
        params.cors_origins = ""
        params.n_threads_http = 1
        params.ui = params.endpoint_slots = params.endpoint_props = False
        return library.Server(params)
    except (RuntimeError, ValueError) as error:
        raise LoadFailed(str(error)) from error
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _cores() -> int:
    with contextlib.suppress(AttributeError, OSError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ---- for the catalogue ----


def available() -> bool:
    """Whether the library is installed. Imports nothing."""
    return importlib.util.find_spec(LIBRARY) is not None


def installed_default(folder: Path | None = None) -> str | None:
    """The reference of the first model whose weights are here; None: none can be used."""
    here = weights.installed(folder)
    return f"local:{here[0].name}" if here and available() else None


def register(folder: Path | None = None) -> None:
    """Makes ``local:NAME`` and ``local:FILE.gguf`` openable.

    ``folder`` is where weights are (None: the usual place, looked up when a model is opened).
    """
    from postroom.models import catalog

    def open_local(opening: catalog.Opening) -> LocalModel:
        path, window = _resolve(opening.ref.name, folder)
        return LocalModel(
            str(opening.ref),
            path,
            window=opening.window or window,
            idle_timeout_ms=opening.idle_timeout_ms,
        )

    catalog.register("local", open_local, default=weights.DEFAULT)


def _resolve(name: str, folder: Path | None) -> tuple[Path, int]:
    """The file of a model's name, and its window.

    Raises:
        UnknownModel: there is no such model.
        ConfigError: its weights, or the library, are not installed.
    """
    if name.endswith(".gguf"):
        path = Path(name).expanduser()
        window = 8192
        if not path.is_file():
            raise ConfigError(f"there is no file {name}")
    else:
        known = weights.find(name)
        path = weights.path_of(known, folder or weights.folder())
        window = known.window
        if all(here.name != name for here in weights.installed(folder)):
            raise ConfigError(
                f"the weights of local:{name} are not installed",
                hint=f"run `postroom model install {name}` ({known.size // 1_000_000} MB, once)",
            )
    if not available():
        raise ConfigError("local models need a part that is not installed", hint=_INSTALL)
    return path, window
