"""Training adapters: where owners read live weights."""

from dcr_stream.sources.torch_source import ResidualConversion, TorchSource, all_agree

__all__ = ["ResidualConversion", "TorchSource", "all_agree"]
