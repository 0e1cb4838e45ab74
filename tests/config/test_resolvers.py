"""What model files compute of config.json."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from atom.config.hydra import register
from atom.config.schema import Config
from atom.errors import ConfigError


def value_of(text: str, **values: Any) -> Any:
    """What a text gives for the field `of.size`, next to these values."""
    register(Config)
    whole: Any = OmegaConf.to_container(OmegaConf.create({**values, "of": {"size": text}}), resolve=True)
    return whole["of"]["size"]


def test_every_is_a_pattern_whose_last_layer_differs():
    assert value_of("${every:3,full,window}") == ["window", "window", "full"]
    assert value_of("${every:1,full,window}") == ["full"]
    assert value_of("${every:${given},full,window}", given=None) is None


def test_every_takes_the_number_of_the_layer_that_differs():
    assert value_of("${every:3,full,window,1}") == ["window", "full", "window"]
    assert value_of("${every:3,full,window,null}") == ["window", "window", "full"]


def test_repeat_cuts_a_pattern_to_the_number_of_layers():
    assert value_of("${repeat:${every:2,sparse,dense,0},3}") == ["sparse", "dense", "sparse"]
    assert value_of("${repeat:[a,b,c],2}") == ["a", "b"]
    assert value_of("${repeat:[a,b,b],6,2}") == ["a", "a", "a", "b", "b", "a"]
    assert [value_of(text) for text in ("${repeat:null,2}", "${repeat:[a],null}")] == [None, None]


def test_paired_takes_the_first_of_two_types_each():
    assert value_of("${paired:[full,mlp,window,mlp],mlp}") == ["full", "window"]
    assert value_of("${paired:null,mlp}") is None


def test_where_is_the_type_of_each_layer():
    assert value_of("${where:${listed},4,full,conv}", listed=[1, 3]) == ["conv", "full", "conv", "full"]
    assert value_of("${where:${listed},2,full,conv}", listed=[]) == ["conv", "conv"]
    assert value_of("${where:[1,3],3,full,conv,1}") == ["full", "conv", "full"]
    assert value_of("${where:null,4,full,conv}") is None
    assert value_of("${where:${listed},4,full,conv}", listed="1, 3") == ["conv", "full", "conv", "full"]


def test_spell_gives_each_letter_its_type_and_count_the_number_of_them():
    assert value_of("${spell:M-*,M,mamba,-,mlp,'*',attention}") == ["mamba", "mlp", "attention"]
    assert value_of("${spell:null,M,mamba}") is None
    assert value_of("${spell:${listed},0,linear,1,full}", listed=[0, 0, 1]) == ["linear", "linear", "full"]
    assert [value_of(f"${{count:{given}}}") for given in ("M-*M", "[a,b]", "null")] == [4, 2, None]


def test_of_type_is_the_value_of_the_layers_of_a_type():
    types = ["full", "window", "window"]
    assert value_of("${of_type:${listed},[full,window,window],window,4}", listed=[4, 6, 6]) == 6
    assert value_of("${of_type:[4,6,6],${listed},full}", listed=types) == 4
    assert value_of("${of_type:null,${listed},full,8}", listed=types) == 8
    assert value_of("${of_type:3,${listed},full,8}", listed=types) == 3
    assert value_of("${of_type:[4],[full],window,8}") == 8


def test_add_leaves_null_as_it_is():
    assert [value_of(text) for text in ("${add:128,1}", "${add:null,1}", "${add:45,0}")] == [129, None, 45]


def test_scaled_leaves_out_the_fraction_and_round_up_takes_the_next_multiple():
    assert value_of("${scaled:6656,2,3}") == 4437
    assert value_of("${scaled:100,1.29}") == 129
    assert value_of("${mul:28,2}") == 56
    assert value_of("${div:1.4,${sqrt:64}}") == 0.175
    assert value_of("${mul:${div:null,2},${sqrt:null}}") is None
    assert value_of("${round_up:4437,256}") == 4608
    assert value_of("${round_up:512,256}") == 512
    assert value_of("${round_up:${scaled:null,2,3},256}") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${every:0,a,b}", "of.size: 0 is not a number of layers from 1 to 512"),
        ("${every:LLLG,a,b}", "of.size: lllg is not a number of layers from 1 to 512"),
        ("${every:3,a,b,3}", "of.size: 3 is no layer of a pattern of 3, counted from 0"),
        ("${every:3,a,b,x}", "of.size: x is no layer of a pattern of 3, counted from 0"),
        ("${repeat:[],3}", "of.size: [] is not a pattern, of 3 layers"),
        ("${repeat:[a],3,-1}", "of.size: -1 is no number of layers ahead of a pattern"),
        ("${repeat:[a],0}", "of.size: ['a'] is not a pattern, of 0 layers"),
        ("${paired:[a,mlp,mlp,a],mlp}", "of.size: every second one of [a, mlp, mlp, a] has to be mlp"),
        ("${paired:[a,mlp,a],mlp}", "of.size: every second one of [a, mlp, a] has to be mlp"),
        ("${where:[2],2,a,b}", "of.size: there is no layer 2, the model has 2"),
        ("${where:[x],2,a,b}", "of.size: there is no layer x, the model has 2"),
        ("${where:7,2,a,b}", "of.size: 7 is not a list of layers, of 2"),
        ("${spell:MEM,M,mamba,-,mlp}", "of.size: E in MEM is no type of layers; letters: M -"),
        ("${scaled:wide,2}", "of.size: wide is not a number above 0"),
        ("${div:3,0}", "of.size: 0 is not a number above 0"),
        ("${sqrt:-4}", "of.size: -4 is not a number above 0"),
        ("${of_type:[4,6],[a,a],a}", "of.size: layers of type a differ in [4, 6]; they have one value"),
        ("${add:wide,1}", "of.size: wide is not a number above 0"),
        ("${minus:3,x}", "of.size: x is not a number above 0"),
        ("${round_up:6,0}", "of.size: 0 is not a number above 0"),
        ("${common:[1],heads,1}", "of.size: [1] is no object with one for each layer"),
        ("${common:{a:{heads:1},b:{heads:2}},heads,1}", "of.size: heads differs between layers: 1, 2"),
    ],
)
def test_another_value_is_named_with_its_field(text: str, message: str):
    with pytest.raises(Exception) as error:
        value_of(text)
    cause: BaseException | None = error.value
    while cause is not None and not isinstance(cause, ConfigError):
        cause = cause.__cause__ or cause.__context__
    assert str(cause) == message


def test_common_is_what_the_listed_layers_have():
    listed = {"1": {"head_dim": 24, "heads": 4}, "3": {"head_dim": 24}}
    assert value_of("${common:${layers},head_dim,16}", layers=listed) == 24
    assert value_of("${common:${layers},kv_heads,16}", layers=listed) == 16
    assert value_of("${common:${layers},head_dim,16}", layers=None) == 16
