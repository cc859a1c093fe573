"""The command ``torchq-compat suggest module:function``: the modules to leave float, by sensitivity.

example:
  torchq-compat suggest -n 3 mymodels.cases:tagger
  torchq-compat suggest --instead 16-bit mymodels.cases:tagger

module:function names a function without arguments that returns model, qconfig_mapping, example_inputs and
calibration_data, as for compare
"""

import argparse

from torchq_compat.comparison.results import Target
from torchq_compat.errors import ScriptError
from torchq_compat.port.process import Subparsers, add_command, import_noise_held_back

#: The name of the 16-bit QConfig in the printed lines.
SIXTEEN_BITS = "sixteen_bits"
#: The QConfig that ``suggest`` uses, as code.
QCONFIG_LINE = f"""\
{SIXTEEN_BITS} = torch.ao.quantization.QConfig(
    activation=torch.ao.quantization.MinMaxObserver.with_args(
        dtype=torch.int16, qscheme=torch.per_tensor_symmetric, quant_min=-(2**15), quant_max=2**15 - 1
    ),
    weight=torch.ao.quantization.default_per_channel_weight_observer,
)"""


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        suggest_command,
        __doc__,
        help="measure the accuracy each module costs, and list those to leave float",
        description="Quantize a model, measure the accuracy that each module costs, and print the lines for "
        "its QConfigMapping that leave the worst modules float.",
    )
    parser.add_argument("-n", type=_count, default=3, help="the maximum number of modules (default 3)")
    parser.add_argument(
        "--instead",
        choices=("float", "16-bit"),
        default="float",
        help="leave the modules float, or give them 16-bit activations, which the backend must support "
        "(default float)",
    )
    parser.add_argument("target", metavar="module:function", help="the function that returns the case")


def suggest_command(args: argparse.Namespace) -> int:
    """Measure, print, and return 0.

    Raises:
        ScriptError: there is no such function, or it does not return a case.
        TorchQCompatError: the model cannot be quantized.
    """
    if ":" not in args.target:
        raise ScriptError.of("TQ973.function_target", target=args.target)
    from torchq_compat.comparison.compare_command import case_of_function

    with import_noise_held_back():
        from torchq_compat.comparison.suggesting import suggest_for
    (case,) = case_of_function(Target(args.target, is_function=True))
    mapping = suggest_for(case, args.n, args.instead)
    print(mapping)
    in_float = args.instead == "float"
    if mapping.chosen and not in_float:
        print(QCONFIG_LINE)
    for path in mapping.chosen:
        print(f"qconfig_mapping.set_module_name({path!r}, {None if in_float else SIXTEEN_BITS})")
    return 0


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError("give a number of 1 or more")
    return count
