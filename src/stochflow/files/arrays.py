"""Arrays from npz files, whose headers are checked before anything of their size is allocated."""

from __future__ import annotations

import io
import math
import os
import zipfile
import zlib
from typing import TYPE_CHECKING

from stochflow.files.reading import LIMIT, MB, Unreadable, read_bytes, shown

if TYPE_CHECKING:
    import numpy as np

UNPACKED = 512 * MB  # of all arrays of a file together
ARRAYS = 1000  # in one file


def read_npz(path: str | os.PathLike[str], most: int = LIMIT, in_folder: bool = True) -> dict[str, np.ndarray]:
    """The arrays of an npz file by name; Unreadable where it is no such file, or claims to be larger than it is."""
    return unpack_npz(read_bytes(path, most, in_folder), shown(path))


def unpack_npz(content: bytes, where: str) -> dict[str, np.ndarray]:
    """The same from bytes. Nothing in it is unpickled."""
    import numpy as np

    try:
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            members = packed.infolist()
            total = sum(m.file_size for m in members)
            if len(members) > ARRAYS or total > UNPACKED:
                raise Unreadable(
                    f"{where} claims to hold {len(members)} arrays of {total / MB:.0f} MB, more than the {UNPACKED // MB} MB "
                    "that are read: write it again"
                )
            found = {}
            for member in members:
                with packed.open(member) as file:
                    _check_header(file, member.file_size)
                with packed.open(member) as file:
                    found[member.filename.removesuffix(".npy")] = np.lib.format.read_array(file, allow_pickle=False)  # type: ignore[arg-type]
            return found
    except Unreadable:
        raise
    except (OSError, ValueError, EOFError, KeyError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error, OverflowError, MemoryError, SyntaxError, TypeError) as error:  # fmt: skip
        raise Unreadable(
            f"{where} is not a whole npz file ({type(error).__name__}): write it again or remove it"
        ) from error


def _check_header(file: object, size: int) -> None:
    """ValueError unless the array is as large as its bytes."""
    import numpy as np

    version = np.lib.format.read_magic(file)  # type: ignore[arg-type]
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)  # type: ignore[arg-type]
    if dtype.hasobject or any(n < 0 for n in shape) or math.prod(shape) * dtype.itemsize > size:
        raise ValueError("its header does not fit its bytes")
