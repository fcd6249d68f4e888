"""Every eager kernel once more under another name: a comparison in which nothing differs.

``b70-replay run … --load bench/self/itself.py --kernel 'eager:*' --kernel 'itself:*'``
"""

import msgspec

from replay.kernels import eager

KERNELS = [msgspec.structs.replace(k, id=k.id.replace("eager:", "itself:", 1)) for k in eager.KERNELS]
