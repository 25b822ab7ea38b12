"""A tiny model that brings its own code, in two files, one of which imports the other."""

import json
import shutil
from importlib.resources import files

CONFIGURATION = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own"
"""
MODELING = """
from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def with_own_code(directory):
    """The demo's model, by another name."""
    shutil.copytree(str(files("penstock.demo") / "model"), directory)
    (directory / "configuration_own.py").write_text(CONFIGURATION)
    (directory / "modeling_own.py").write_text(MODELING)
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    config = json.loads((directory / "config.json").read_text())
    config |= {"auto_map": auto_map, "model_type": "own", "architectures": ["OwnModel"]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory
