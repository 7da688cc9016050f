"""Receipts of audits: written beside a run, signed with the OpenSSF's model-signing, verified. Imports no torch."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from lineage.atomic import write_json
from lineage.digest import MARKER, is_sealed, sha256_file
from lineage.environment import describe_environment
from lineage.errors import BadInput, IntegrityFailure
from lineage.extras import import_extra
from lineage.files import Environment, one_line
from lineage.receipt import AUDIT, STATEMENT, Audit, Receipt, read_receipt, signature_of
from lineage.run import MANIFEST

EXTRA = "sign"
RECORDS = (MANIFEST, "metrics.jsonl", "records.jsonl", "summary.json")


def receipt_writer(run: Path, receipt: Path | None, key: Path | None) -> Callable[[Audit], None]:
    """What writes a receipt of the run, signed if there is a key, or does nothing where none is asked for.

    Raises BadInput, before the work, for a place inside the run, a key that cannot be read or a missing library.
    """
    if receipt is None:
        if key:
            raise BadInput("--key signs a receipt: say with --receipt where it is written")
        return lambda audit: None
    for path in filter(None, (receipt, key)):
        if path.resolve().is_relative_to(run.resolve()):
            raise BadInput(f"{path} lies in the run: neither a receipt, which would break its seal, nor a key may")
    signer = None
    if key:
        try:
            signer = import_extra("model_signing.signing", EXTRA).Config().use_elliptic_key_signer(private_key=key)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise BadInput(f"{key} is not a private key of an elliptic curve in PEM: {one_line(error)}") from error

    def write(audit: Audit) -> None:
        signature_of(receipt).unlink(missing_ok=True)
        write_json(receipt, _statement(run, audit))
        if signer:
            signer.sign(receipt, signature_of(receipt))
        print(f"written: {receipt}" + (f", signed: {signature_of(receipt)}" if signer else ", not signed"))

    return write


def verify_receipt(path: Path, key: Path, run: Path | None) -> Receipt:
    """The receipt, if the key's owner signed it and it is about the run.

    Raises IntegrityFailure where the signature is missing or not the key's, or a file of the run is another.
    """
    verifying = import_extra("model_signing.verifying", EXTRA)
    try:
        verifier = verifying.Config().use_elliptic_key_verifier(public_key=key)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BadInput(f"{key} is not a public key of an elliptic curve in PEM: {one_line(error)}") from error
    receipt = read_receipt(path)
    if not receipt.key:
        raise IntegrityFailure(f"{path} is not signed: there is no {signature_of(path).name}")
    try:
        verifier.verify(path, signature_of(path))
    except Exception as error:  # the library and those below it have many
        raise IntegrityFailure(
            f"{path} was not signed with {key}, or was changed since ({type(error).__name__})"
        ) from error
    if run:
        _check_subjects(receipt, run.resolve())
    return receipt


def _statement(run: Path, audit: Audit) -> dict[str, object]:
    """The in-toto statement about a sealed directory as it is now."""
    markers = [
        path for path in sorted(run.rglob(MARKER)) if not any(p.startswith(".") for p in path.relative_to(run).parts)
    ]
    files = [*markers, *(run / name for name in RECORDS if (run / name).is_file())]
    said = {
        "run": run.resolve().name,
        "version": Environment.model_validate(describe_environment()).version,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return {
        "_type": STATEMENT,
        "subject": [{"name": str(path.relative_to(run)), "digest": {"sha256": sha256_file(path)}} for path in files],
        "predicateType": AUDIT,
        "predicate": audit.model_copy(update=said).to_json(),
    }


def _check_subjects(receipt: Receipt, run: Path) -> None:
    """Raise IntegrityFailure unless every file that the receipt is about is the run's."""
    if MARKER not in receipt.subjects or not is_sealed(run):
        raise IntegrityFailure(f"the receipt says nothing of the sealed directory {run}")
    for name, digest in receipt.subjects.items():
        file = (run / name).resolve()
        if not file.is_relative_to(run) or not file.is_file() or sha256_file(file) != digest:
            raise IntegrityFailure(f"the receipt is not for {run} as it is: {name} is another ({receipt.audit.run})")
