"""Models: one decoder for the Llama family, loaded from safetensors or GGUF."""

from headrace_worker.model.config import ModelConfig
from headrace_worker.model.decoder import Decoder
from headrace_worker.model.errors import ModelLoadError
from headrace_worker.model.loading import LoadedModel, load_model

__all__ = ["Decoder", "LoadedModel", "ModelConfig", "ModelLoadError", "load_model"]
