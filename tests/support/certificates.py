"""Certificates for tests of TLS: an authority, a server on 127.0.0.1 and a client."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_EXTENSIONS = "subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n"


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files of one authority."""

    folder: Path

    @property
    def authority(self) -> Path:
        """What both sides trust."""
        return self.folder / "ca.crt"

    def certificate(self, name: str) -> Path:
        """Certificate of ``server`` or ``client``."""
        return self.folder / f"{name}.crt"

    def key(self, name: str) -> Path:
        """Private key of ``server`` or ``client``."""
        return self.folder / f"{name}.key"

    def server_options(self, port: int) -> dict[str, str]:
        """Options of a Redis that takes only clients with a certificate."""
        return {
            "tls-port": str(port),
            "tls-cert-file": str(self.certificate("server")),
            "tls-key-file": str(self.key("server")),
            "tls-ca-cert-file": str(self.authority),
            "tls-auth-clients": "yes",
        }

    def query(self) -> str:
        """Options of a URL: whom to trust, and what to show."""
        return (
            f"ssl_ca_certs={self.authority}&ssl_certfile={self.certificate('client')}"
            f"&ssl_keyfile={self.key('client')}"
        )


def make_certificates(folder: Path) -> Certificates:
    """Make an authority and two certificates that it signs."""
    folder.mkdir()
    made = Certificates(folder)
    (folder / "extensions").write_text(_EXTENSIONS)
    _openssl(folder, "req", "-x509", *_KEY, "-days", "2", "-subj", "/CN=test authority",
             "-keyout", "ca.key", "-out", "ca.crt")  # fmt: skip
    for name in ("server", "client"):
        _openssl(folder, "req", *_KEY, "-subj", f"/CN={name}",
                 "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
        _openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key",
                 "-CAcreateserial", "-days", "2", "-extfile", "extensions",
                 "-out", f"{name}.crt")  # fmt: skip
    return made


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
