"""Answers that are kept in this process, for routers that share it; it can be away."""

from dataclasses import dataclass, field

from baton.cluster.registry import RegistryUnavailable


@dataclass
class MemoryAnswers:
    kept: dict[str, bytes] = field(default_factory=dict)
    away: bool = False
    asked: int = 0

    async def put(self, tenant: str, name: str, answer: bytes, life_s: float) -> bool:
        self._ask()
        self.kept[name] = answer
        return True

    async def get(self, name: str) -> bytes | None:
        self._ask()
        return self.kept.get(name)

    async def delete(self, tenant: str, name: str) -> bool:
        self._ask()
        return self.kept.pop(name, None) is not None

    async def close(self) -> None:
        pass

    def _ask(self) -> None:
        self.asked += 1
        if self.away:
            raise RegistryUnavailable("down", "it is away")
