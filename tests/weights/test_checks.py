from __future__ import annotations

import pytest

from atom.errors import CheckpointError
from atom.weights.checks import check_surplus

MODULE = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("rest", ["bias", "scale", "weight_scale_2", "g_idx"])
@pytest.mark.parametrize("used", ["weight", "weight_packed"])
def test_what_a_used_weight_is_computed_with_is_never_said_to_be_ignorable(rest: str, used: str) -> None:
    needed = [f"{MODULE}.{used}"]
    with pytest.raises(CheckpointError) as error:
        check_surplus(needed, ["model.other.weight", f"{MODULE}.{rest}", *needed])
    assert str(error.value) == (
        f"the model does not use tensor {MODULE}.{rest}, though it uses {needed[0]}: without it answers are wrong; "
        "is model= the right one?"
    )
    check_surplus(needed, [f"{MODULE}.{rest}"], ignore=[f"*.{rest}"])


def test_a_module_that_is_not_used_may_be_ignored() -> None:
    message = r"^the model does not use tensor vision\.up\.weight \(and 1 more\); name it in model\.ignore if it may"
    with pytest.raises(CheckpointError, match=message):
        check_surplus([f"{MODULE}.weight"], ["vision.up.weight", "vision.up.bias"])
