"""From sources to one shared library in the cache, once, whoever else builds at the same time."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 600.0  # of one compiler call
_MAX_COMPLAINT = 2000  # characters of a compiler's output that are passed on


class BuildFailed(Exception):
    """The library could not be built; the message says why, with the compiler's last words."""


@dataclass(frozen=True, slots=True)
class Build:
    """One library to be: ``folder/library.so`` beside the digest of its bytes.

    A reader takes no lock. It believes a library whose digest is right, so that one that was cut
    short (a full disk, a crash) is never mapped: touching its missing end would kill the process.
    """

    sources: tuple[Path, ...]
    folder: Path  # of this build alone; its name is the build's key
    compiler: str | None  # path; None: there is none
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]

    @property
    def library(self) -> Path:
        """Where the library is or will be."""
        return self.folder / "library.so"

    @property
    def is_ready(self) -> bool:
        """True when the library is there, whole."""
        try:
            return self._digest.read_text() == _digest_of(self.library)
        except OSError:
            return False

    def ensure(self) -> bool:
        """Build unless it is ready, waiting for whoever builds it now; return True if it built.

        Raises:
            BuildFailed: no compiler, a compiler's error, or a folder that cannot be written.
        """
        if self.is_ready:
            return False
        try:
            with self._locked():
                if self.is_ready:  # somebody else was faster
                    return False
                self._build()
                return True
        except OSError as error:
            raise BuildFailed(f"cannot build in {self.folder}: {error}") from error

    def discard(self) -> None:
        """Make the next ``ensure`` build anew."""
        self._digest.unlink(missing_ok=True)

    @property
    def _digest(self) -> Path:
        return self.folder / "library.sha256"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock, which the kernel drops when its holder dies."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _build(self) -> None:
        if self.compiler is None:
            raise BuildFailed("no C++ compiler: install g++, or name one in CXX")
        for leftover in self.folder.glob("build-*"):  # of builds that were killed
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="build-") as scratch:
            library = self._compile_and_link(self.compiler, Path(scratch))
            digest = _digest_of(library)
            os.replace(library, self.library)
            (Path(scratch) / "digest").write_text(digest)
            os.replace(Path(scratch) / "digest", self._digest)

    def _compile_and_link(self, compiler: str, scratch: Path) -> Path:
        objects = [scratch / f"{source.stem}.o" for source in self.sources]
        commands = [
            [compiler, *self.compile_flags, "-c", str(source), "-o", str(target)]
            for source, target in zip(self.sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        library = scratch / "library.so"
        _run([compiler, *map(str, objects), *self.link_flags, "-o", str(library)])
        return library


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise BuildFailed(f"{command[0]} did not end within {_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        complaint = done.stderr.strip()[-_MAX_COMPLAINT:]
        raise BuildFailed(f"{command[0]} ended with status {done.returncode}: {complaint}")


def _digest_of(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()
