"""What torch.ao's setters of custom configs do not check is checked when they are read, by name."""

from __future__ import annotations

import pytest
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig

from torchq_compat.errors import ConfigError
from torchq_compat.read.custom_configs import read_prepare_custom_config


@pytest.mark.parametrize("setting", vars(PrepareCustomConfig()))
def test_each_setting_is_checked(setting: str) -> None:
    config = PrepareCustomConfig()
    read_prepare_custom_config(config)
    setattr(config, setting, 3)
    with pytest.raises(ConfigError, match=setting):
        read_prepare_custom_config(config)
