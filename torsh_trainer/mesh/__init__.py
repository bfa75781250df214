"""How the processes of a run divide the work: axes with names, and groups by meaning."""

from torsh_trainer.mesh.axes import AXES as AXES
from torsh_trainer.mesh.axes import MEANINGS as MEANINGS
from torsh_trainer.mesh.axes import Axis as Axis
from torsh_trainer.mesh.axes import Meaning as Meaning
from torsh_trainer.mesh.axes import Mesh as Mesh
from torsh_trainer.mesh.axes import MeshOptions as MeshOptions
from torsh_trainer.mesh.groups import Groups as Groups
