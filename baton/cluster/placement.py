"""How a launcher places processes that start together. Apart from the configuration, which each supervisor on Ray would load with it."""

from typing import Literal

Placement = Literal["spread", "pack", "strict-spread", "strict-pack"]
