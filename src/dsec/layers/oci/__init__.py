"""Images in the forms of the Open Container Initiative and of Docker, read from and written to anywhere.

`open_image(source)` gives an `ImageSource`; `write_layout`, `write_archive` and `push` take a `NewImage`, of
which `of_image` makes one from an image that is there.
"""

from dsec.layers.oci.credentials import Credentials
from dsec.layers.oci.export import NewImage, NewLayer, of_image, push, write_archive, write_layout
from dsec.layers.oci.http import Patience
from dsec.layers.oci.model import Descriptor, OciConfig
from dsec.layers.oci.open import open_image
from dsec.layers.oci.reference import Reference
from dsec.layers.oci.registry import Registry
from dsec.layers.oci.source import ImageSource

__all__ = [
    "Credentials",
    "Descriptor",
    "ImageSource",
    "NewImage",
    "NewLayer",
    "OciConfig",
    "Patience",
    "Reference",
    "Registry",
    "of_image",
    "open_image",
    "push",
    "write_archive",
    "write_layout",
]
