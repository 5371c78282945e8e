"""What is in a token dataset, and in a batch of a run, as plain facts and as text for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.config.errors import Refused
from jaxscale.config.phases import cursor_at_step, phase_at
from jaxscale.data.loader import batch_at, batch_digest, row_digests
from jaxscale.data.manifest import FORMAT, MANIFEST
from jaxscale.data.mixture import Mixture
from jaxscale.data.order import Order
from jaxscale.data.origin import document_origin
from jaxscale.data.progress import Progress, silent
from jaxscale.data.store import TokenDataset


def inspect(path: Path, tokenizer: str | None = None, progress: Progress = silent) -> dict[str, Any]:
    """Facts of a dataset or of token files of another program, opened as by `TokenDataset.open`.

    Only such files are read, once, at first use. Raises Refused for what is not whole.
    """
    dataset = TokenDataset.open(path, tokenizer, progress)
    return {
        "path": str(path),
        "format": dataset.built.get("format", FORMAT),
        "documents": dataset.documents,
        "tokens": dataset.tokens,
        "text_bytes": dataset.text_bytes,
        "bytes_per_token": None if dataset.text_bytes is None else dataset.text_bytes / dataset.tokens,
        "tokens_per_document": dataset.tokens / dataset.documents,
        "shards": len(dataset.shards),
        "dtype": dataset.dtype,
        "vocabulary_size": dataset.vocabulary_size,
        "tokenizer": "bytes (built in)" if dataset.built_in_tokenizer else str(dataset.folder / "tokenizer.json"),
        "end_id": dataset.end_id,
        "begin_id": dataset.begin_id,
        "mask_id": dataset.mask_id,
        "fingerprint": dataset.fingerprint,
        "manifest": str(dataset.folder / MANIFEST),
        "built": dataset.built,
    }


def inspect_text(facts: dict[str, Any]) -> str:
    """The facts of `inspect`, a line each."""
    unknown = {name: "unknown" for name in ("text_bytes", "bytes_per_token") if facts[name] is None}
    flat = {name: value for name, value in (facts | unknown).items() if name != "built"}
    built = facts["built"]
    told = ("settings", "format", "path")
    flat |= {f"built.{name}": value for name, value in built.items() if name not in told}
    flat |= {f"built.settings.{name}": value for name, value in built.get("settings", {}).items()}
    width = max(map(len, flat))
    return "\n".join(f"{name:{width}}  {_shown(value)}" for name, value in flat.items())


def show_rows(mixture: Mixture, order: Order, step: int, row: int | None = None) -> dict[str, Any]:
    """The batch of update `step` (1 is the first, as in metrics.jsonl), or one row of it, decoded.

    The batch comes from the code that feeds the run, so its digest is the `batch_digest` of that line of metrics.jsonl.
    Raises Refused for a step or row that does not exist.
    """
    if step < 1:
        raise Refused(f"--step {step}: the first update is 1")
    if order.steps is not None and step > order.steps:
        raise Refused(f"--step {step}: a source has had its max_epochs after step {order.steps}")
    cursor = cursor_at_step(order.phases, step - 1)
    phase = phase_at(order.phases, cursor)
    if row is not None and not 0 <= row < phase.global_batch:
        raise Refused(f"--row {row}: the batch has rows 0 to {phase.global_batch - 1}")
    batch = batch_at(mixture, order, step - 1, np.arange(phase.global_batch))
    examples = order.batch(cursor)
    names, datasets, tokenizer = list(mixture.datasets), list(mixture.datasets.values()), mixture.first.tokenizer()
    rows = []
    for number in range(phase.global_batch) if row is None else [row]:
        tokens, index = batch.tokens[number, : batch.lengths[number]], int(examples.rows[number])
        source = int(examples.sources[number])
        documents, begin = [], 0
        for span in mixture.view(source, phase.sequence_length).documents_in_row(index):
            end = begin + span.last - span.first + 1
            origin = document_origin(datasets[source], span.document)
            text = tokenizer.decode(tokens[begin:end])
            documents.append({**span._asdict(), "origin": origin, "text": text})
            begin = end
        rows.append(
            {
                "row": number,
                "source": names[source],
                "dataset_row": index,
                "tokens": len(tokens),
                "documents": documents,
            }
        )
    return {
        "step": step,
        "cursor": cursor,
        "sequence_length": phase.sequence_length,
        "global_batch": phase.global_batch,
        "batch_digest": batch_digest(row_digests(batch.tokens, batch.lengths)),
        "rows": rows,
    }


def show_text(facts: dict[str, Any]) -> str:
    """The facts of `show_rows` for people: each document's part under a line that says where it is from."""
    lines = [
        f"step {facts['step']}: examples {facts['cursor']} to {facts['cursor'] + facts['global_batch'] - 1}, "
        f"{facts['sequence_length']} tokens each, batch digest {facts['batch_digest']}"
    ]
    for row in facts["rows"]:
        origin = f"row {row['dataset_row']} of {row['source']}, {row['tokens']} tokens"
        lines.append(f"\n== row {row['row']} of the batch: {origin}")
        for part in row["documents"]:
            span = f"tokens {part['first']} to {part['last']} of {part['tokens']}"
            known = part["origin"]
            where = f" ({known['id']}, from {known['position']} of {known['source']})" if known else ""
            lines.append(f"-- document {part['document']}{where}, {span}\n{part['text']}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    """Numbers with separators, fractions with two digits, the rest as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
