"""Say what a file is that calls itself safetensors and is not."""

from __future__ import annotations

import codecs

_COPY = "download the file itself"
_MAGIC = (
    (b"version https://git-lfs.github.com", "a git-LFS pointer, not the file it stands for; run git lfs pull"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes (.pt, .bin, .ckpt); save its tensors with safetensors"),
    (b"\x1f\x8b", "gzip data; unpack it first"),
    (b"GGUF", "a GGUF file, which holds quantised weights; take the safetensors file"),
    (b"\x89HDF", "an HDF5 file; save its tensors with safetensors"),
    (b"\x93NUMPY", "a NumPy array; save its tensors with safetensors"),
    (b"7z\xbc\xaf", "a 7z archive; unpack it first"),
    (b"Rar!", "a RAR archive; unpack it first"),
    (b"\xfd7zXZ", "xz data; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "zstd data; unpack it first"),
    (b"BZh", "bzip2 data; unpack it first"),
    (b"%PDF", f"a PDF; {_COPY}"),
    (b"\x89PNG", f"a PNG picture; {_COPY}"),
    (b"\xff\xd8\xff", f"a JPEG picture; {_COPY}"),
    (b"RIFF", f"a WebP picture or other RIFF file; {_COPY}"),
    *((bytes((0x80, n)), "a pickle, as torch.save writes; save its tensors with safetensors") for n in range(2, 6)),
)


def what_is(head: bytes, size: int) -> str | None:
    """What the first bytes of a file of `size` bytes show and what to do; None when it may be safetensors."""
    if not size:
        return f"empty (0 bytes); {_COPY} again"
    if size <= 8 or head[8:9] == b"{":  # eight bytes of length, then a JSON header
        return None
    head = head.removeprefix(codecs.BOM_UTF8)
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if head[257:262] == b"ustar":
        return "a tar archive; unpack it first"
    if not head.strip(b"\0"):
        return "zeros where its header should be; the download was not finished, get it again"
    try:
        text = head.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        return None
    if any(ord(letter) < 32 and letter not in "\t\r\n\f" for letter in text):
        return None
    lower = text.lower()
    if "annex/objects" in lower:
        return "a git-annex pointer, not the file it stands for; run git annex get"
    if lower.startswith("<") and "html" in lower:
        return f"an HTML page, such as a login or error page; {_COPY}"
    for start, name in (("<", "XML"), ("{", "JSON"), ("[", "JSON")):
        if lower.startswith(start):
            return f"{name} text ({text[:40]!r}…); {_COPY}"
    return f"plain text ({text[:40]!r}…); {_COPY}"
