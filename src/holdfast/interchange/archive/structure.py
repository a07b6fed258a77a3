"""What an archive of ``torch.save`` holds: plain values, and where the numbers of tensors lie.

    archive -> records (zips.py) -> the record data.pkl -> values (pickles.py, names.py)

Invariants:
- No number of a tensor is read here, and no record but the structure's and the byte order's.
- A tensor lies inside the record it names.
- What is returned can be walked: it holds no value inside of itself, and sharing is bounded.
"""

from __future__ import annotations

from typing import Any

from holdfast.boundary.budget import Account
from holdfast.errors import CorruptDataError, InvalidRequestError
from holdfast.interchange.archive import nested
from holdfast.interchange.archive.files import Extent, shown
from holdfast.interchange.archive.names import StorageKind, StoredNumbers, torch_names
from holdfast.interchange.archive.pickles import read_pickle
from holdfast.interchange.archive.zips import read_records

_PICKLE = "data.pkl"


def read_structure(archive: Extent, account: Account) -> Any:
    """What an archive holds, with a ``StoredTensor`` for every tensor: no numbers are read.

    Raises:
        UnknownNameError: it names something that is neither a tensor nor a plain value.
        CorruptDataError: it is no such archive, or damaged.
        InvalidRequestError: it is of a kind that is not imported, or takes more memory than the
            input's size allows.
    """
    records = read_records(archive, account)
    path = shown(archive.path)
    if "constants.pkl" in records:
        raise InvalidRequestError(
            "this is a program of TorchScript", path=path, todo="torch.save its state_dict()"
        )
    if _PICKLE not in records:
        raise CorruptDataError("an archive without a structure", path=path)
    order = records.get("byteorder")
    if order is not None and (order.bytes != len("little") or order.read() != b"little"):
        raise InvalidRequestError("numbers are not little-endian", path=path)

    def numbers(reference: Any) -> StoredNumbers:
        match reference:
            case ("storage", StorageKind() as kind, str() as key, str(), int() as count):
                record = records.get(f"data/{key}")
                item = 1 if kind.dtype is None else kind.dtype.itemsize
                if record is not None and 0 <= count * item <= record.bytes:
                    return StoredNumbers(record.part(0, count * item), kind.dtype)
        raise CorruptDataError("a tensor refers to no record that could hold it", path=path)

    what = f"structure of {archive.path.name[:80]}"
    with account.holding_memory(2 * records[_PICKLE].bytes, claim=what):
        data = records[_PICKLE].read()
        root = read_pickle(data, torch_names(), what=what, account=account, persistent=numbers)
    nested.check_size(root, account, what=path)
    return root
