"""What is said of the device."""

import pytest

from server.engine import device
from server.settings import load

LIBRARY = b"made for CUDA"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs MLX's package for CUDA into a folder of its own, with a library that may be another's since."""

    def install(package="mlx_cuda_13", library=LIBRARY):
        (tmp_path / "mlx" / "lib").mkdir(parents=True)
        (tmp_path / "mlx" / "lib" / "libmlx.so").write_bytes(library)
        facts = tmp_path / f"{package}-0.99.0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 0.99.0\n")
        (facts / "RECORD").write_text(f"mlx/lib/libmlx.so,sha256=0,{len(LIBRARY)}\n{facts.name}/METADATA,,\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


@pytest.mark.parametrize("package", ["mlx_cuda_13", "mlx_cuda_12"])
def test_a_cuda_package_that_another_one_wrote_over_is_named_with_what_mends_it(installed, package):
    installed(package, b"for the CPU")
    name = package.replace("_", "-")
    assert f"pip install --force-reinstall --no-deps {name}==0.99.0" in device.hidden_gpu()


def test_a_cuda_package_in_its_place_is_nothing_to_speak_of(installed):
    installed()
    assert device.hidden_gpu() == ""


def test_without_a_cuda_package_there_is_nothing_to_speak_of():
    assert device.hidden_gpu() == ""


@pytest.mark.parametrize("written_over", [True, False])
def test_check_speaks_of_cuda_only_where_it_is_hidden(installed, written_over):
    installed(library=b"for the CPU" if written_over else LIBRARY)
    assert ("cuda" in device.facts(load({}))) == written_over
