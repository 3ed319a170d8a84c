"""What units a store holds: whoever opens what outlives a process must ask for the same."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnitKind:
    fingerprint: bytes  # `KvLayout.fingerprint`
    unit_bytes: int
    seal: str = ""  # `sealed_store.seal_name` of the key with which they are encrypted; empty: they are not

    @property
    def facts(self) -> dict[str, str | int]:
        """The facts as they are written beside the units."""
        return {"fingerprint": self.fingerprint.hex(), "seal": self.seal, "unit_bytes": self.unit_bytes}

    def check(self, found: dict[str, object], where: str) -> None:
        """Raises ValueError, which names `where` and the field, if `found` are not these facts."""
        for field, ours in self.facts.items():
            theirs = found.get(field)
            if theirs == ours:
                continue
            if field == "seal":
                raise ValueError(f"{where} is {_sealed(theirs)}, and the store {_sealed(ours)}: use that key, or another place")
            raise ValueError(f"{where} holds KV of another model or layout: {field} {theirs} there, {ours} here; use another place")


def _sealed(seal: object) -> str:
    return f"encrypted with the key {seal}" if seal else "not encrypted"
