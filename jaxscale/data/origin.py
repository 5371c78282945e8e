"""Where the documents of a shard come from: `documents-00000.parquet`, one row a document, for people, not training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.data.store import TokenDataset

ROWS = 2**16
"""Documents that are in memory before they are written."""


class Origin(NamedTuple):
    """Where a document comes from."""

    id: str
    """What the held-out split and everything random about the document follow from."""
    source: str
    """The file, as its name in the corpus."""
    position: int
    """Byte of the (uncompressed) JSONL where its line starts, row of the Parquet file, or 0."""


class OriginWriter:
    """Writes the origins of a shard's documents, in their order."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        from pyarrow import parquet

        kinds = {"id": pyarrow.string(), "source": pyarrow.string(), "position": pyarrow.int64()}
        self._schema = pyarrow.schema(list(kinds.items()))
        self._writer = parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._origins: list[Origin] = []

    def add(self, origin: Origin) -> None:
        """Append one."""
        self._origins.append(origin)
        if len(self._origins) == ROWS:
            self._write()

    def close(self) -> None:
        """Complete the file."""
        if self._origins:
            self._write()
        self._writer.close()

    def _write(self) -> None:
        import pyarrow

        columns = map(list, zip(*self._origins, strict=True))
        self._writer.write_table(pyarrow.table(list(columns), schema=self._schema))
        self._origins = []


def document_origin(dataset: TokenDataset, document: int) -> dict[str, Any] | None:
    """`id`, `source` and `position` of a document of a dataset, by its number; None where that is not recorded."""
    for shard in dataset.shards:
        if document < shard.documents:
            path = (dataset.folder / shard.documents_file).with_suffix(".parquet")
            return _row(path, document) if path.is_file() else None
        document -= shard.documents
    raise IndexError(f"{dataset.path}: has no such document")


def _row(path: Path, row: int) -> dict[str, Any]:
    """One row of a Parquet file; reads no more than the group of rows that it is in."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if row < rows:
                return file.read_row_group(group).slice(row, 1).to_pylist()[0]
            row -= rows
    raise IndexError(f"{path}: has no such row")
