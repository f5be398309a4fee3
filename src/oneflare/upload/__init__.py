"""The one message that a client sends: a safetensors file whose header carries a manifest.

`contract` says what the server expects, `writing` what leaves a client, `reading` checks a file before any tensor is
used, `tensors` copies them into memory before they are compared with their digests, `message` is the verified upload.
"""

from oneflare.upload.checking import notes_of, read_layout, read_manifest
from oneflare.upload.contract import (
    COUNTS,
    ENCODER,
    EVIDENCE,
    KNOWN,
    MANIFEST,
    PROTOTYPES,
    SIZE_LIMIT,
    STATISTICS,
    Agreement,
    Contract,
)
from oneflare.upload.message import Upload, read_prototypes, read_tensors, read_upload, read_weights
from oneflare.upload.writing import Contents, SentForm, disclose, seal_upload, shrink, write_upload

__all__ = [
    "COUNTS",
    "ENCODER",
    "EVIDENCE",
    "KNOWN",
    "MANIFEST",
    "PROTOTYPES",
    "SIZE_LIMIT",
    "STATISTICS",
    "Agreement",
    "Contents",
    "Contract",
    "SentForm",
    "Upload",
    "disclose",
    "notes_of",
    "read_layout",
    "read_manifest",
    "read_prototypes",
    "read_tensors",
    "read_upload",
    "read_weights",
    "seal_upload",
    "shrink",
    "write_upload",
]
