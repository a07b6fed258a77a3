"""The public name of the callback: ``from holdfast.lightning import HoldfastCallback``."""

from holdfast.integrations.lightning import HoldfastCallback

__all__ = ["HoldfastCallback"]
