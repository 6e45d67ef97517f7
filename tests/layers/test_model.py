from dsec.core.images import ImageConfig
from dsec.layers.model import DEFAULT_PATH, merge


def test_higher_layers_win():
    base = ImageConfig(env={"A": "1", "B": "1"}, user="root", workdir="/", shell=["/bin/sh"])
    above = ImageConfig(env={"B": "2"}, workdir="/srv")
    assert merge([base, above]) == ImageConfig(
        env={"A": "1", "B": "2"}, user="root", workdir="/srv", shell=["/bin/sh"]
    )


def test_a_toolkit_puts_itself_before_path():
    toolkit = ImageConfig(env={"PATH": "/opt/bin:${PATH}"})
    assert merge([ImageConfig(), toolkit]).env["PATH"] == f"/opt/bin:{DEFAULT_PATH}"
    assert (
        merge([ImageConfig(env={"PATH": "/bin"}), toolkit, toolkit]).env["PATH"] == "/opt/bin:/opt/bin:/bin"
    )


def test_nothing_else_is_expanded():
    assert merge([ImageConfig(env={"A": "1"}), ImageConfig(env={"B": "${A}$A"})]).env["B"] == "${A}$A"


def test_none():
    assert merge([]) == ImageConfig()
