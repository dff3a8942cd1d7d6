"""An S3 server on the loopback for tests: moto, in a process of its own, one bucket in it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator

import pytest

BUCKET = "bucket"


@contextlib.contextmanager
def running_s3() -> Iterator[str]:
    """The server's URL; it is stopped at the end."""
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    pipe = server.stderr
    assert pipe is not None
    # What it says is read to its end: a full pipe would hold it up.
    rest = threading.Thread(target=pipe.read, daemon=True)
    try:
        url = ""
        for line in pipe:
            if found := re.search(r"Running on (http://[\d.:]+)", line):
                url = found[1]
                break
        assert url, "the S3 server did not start"
        rest.start()
        request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
        with urllib.request.urlopen(request, timeout=10):
            pass
        yield url
    finally:
        server.kill()
        server.wait()
        if rest.ident is not None:
            rest.join()
        pipe.close()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The URL of an S3 server with a bucket named `BUCKET`."""
    with running_s3() as url:
        yield url
