"""Where the imports that rewritten code needs are inserted."""

from __future__ import annotations

from textwrap import dedent

import pytest

from torchq_compat.port.constructs import ImportRequest, apply_edits
from torchq_compat.port.source.imports import import_edits, why_not_free
from torchq_compat.port.source.parsed import ParsedSource

NEW = "from torch.ao.quantization import QConfigMapping\n"


def with_import(code: str, *marks: str) -> str:
    """Return ``code`` after an import of QConfigMapping was requested at each mark."""
    source = ParsedSource(dedent(code))
    requests = [
        ImportRequest("torch.ao.quantization", "QConfigMapping", source.text.index(mark)) for mark in marks
    ]
    return apply_edits(source.data, import_edits(source, requests)).decode()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("use()\n", f"{NEW}use()\n"),
        ('"""Doc."""\nuse()\n', f'"""Doc."""\n{NEW}use()\n'),
        ("from __future__ import annotations\nuse()\n", f"from __future__ import annotations\n{NEW}use()\n"),
        ("# c\n\nimport torch\nimport os\nuse()\n", f"# c\n\nimport torch\n{NEW}import os\nuse()\n"),
        ("import os\nuse()", f"import os\n{NEW}use()"),
        ("import torch; use()", f"{NEW}import torch; use()"),
        ("use()\nimport torch\n", f"{NEW}use()\nimport torch\n"),
        (f"{NEW}use()\n", f"{NEW}use()\n"),
        (
            "from torch.ao.quantization import QConfig\nuse()\n",
            "from torch.ao.quantization import QConfig, QConfigMapping\nuse()\n",
        ),
        (
            "from torch.ao.quantization import (\n    QConfig,  # c\n)\nuse()\n",
            "from torch.ao.quantization import (\n    QConfig, QConfigMapping,  # c\n)\nuse()\n",
        ),
        ("try:\n    import torch\nexcept E:\n    pass\nuse()\n", None),
    ],
)
def test_place(before: str, after: str | None) -> None:
    assert with_import(before, "use()") == (NEW + before if after is None else after)


def test_a_file_that_imports_torch_in_functions_goes_on_so() -> None:
    code = """
    import os

    def one():
        import torch
        if os:
            use_1()
        else:
            use_2()

    async def two():
        use_3()
    """
    assert with_import(code, "use_1", "use_2", "use_3") == dedent(
        """
        import os

        def one():
            import torch
            from torch.ao.quantization import QConfigMapping
            if os:
                use_1()
            else:
                use_2()

        async def two():
            from torch.ao.quantization import QConfigMapping
            use_3()
        """
    )


@pytest.mark.parametrize(
    ("code", "free"),
    [
        ("", True),
        (NEW, True),
        ("from torch.ao.quantization.quantize_fx import QConfigMapping\n", True),
        ("from mine import QConfigMapping\n", False),
        ("def QConfigMapping(): pass\n", False),
        ("def f(QConfigMapping): pass\n", False),
    ],
)
def test_a_name_is_free_if_it_means_nothing_else(code: str, free: bool) -> None:
    request = ImportRequest("torch.ao.quantization", "QConfigMapping")
    assert (not why_not_free(ParsedSource(code), request)) is free
