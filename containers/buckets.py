"""``python -m hintloop.containers.buckets URI...`` makes the buckets of the s3:// URIs among these that are missing."""

from __future__ import annotations

import sys
from urllib.parse import urlsplit


def names(uris: list[str]) -> list[str]:
    """The buckets that the URIs are in."""
    return sorted({urlsplit(uri).netloc for uri in uris if uri.startswith("s3://")})


def main() -> None:
    """Make them. ``OSError`` when the store does not answer, or refuses."""
    import s3fs

    store = s3fs.S3FileSystem()
    for name in names(sys.argv[1:]):
        if not store.exists(name):
            store.mkdir(name)


if __name__ == "__main__":
    main()
