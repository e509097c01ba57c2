"""tensorrt_llm/_torch/pyexecutor/model_loader.py (1.2 to 1.4): builds the model, holds the arguments."""

from tensorrt_llm._torch.models import modeling_utils


class ModelLoader:
    def __init__(self, llm_args):
        self.llm_args = llm_args

    def load(self, architecture, model_config):
        model = modeling_utils.MODEL_CLASS_MAPPING[architecture](model_config)
        for module in model.modules():
            if hasattr(module, "post_load_weights"):
                module.post_load_weights()
        return model
