"""Parameters, draftings, acceptance rules, modes and quality metrics: one row each, without torch.

Other packages import these names to add a row (docs/adding-a-rule.md, docs/adding-a-drafting.md,
docs/adding-a-metric.md).
"""

from lantern_bench.methods.draftings import Drafting as Drafting
from lantern_bench.methods.draftings import Mode as Mode
from lantern_bench.methods.metrics import Metric as Metric
from lantern_bench.methods.metrics import image_metric as image_metric
from lantern_bench.methods.metrics import set_metric as set_metric
from lantern_bench.methods.parameters import Kind as Kind
from lantern_bench.methods.parameters import Parameter as Parameter
from lantern_bench.methods.parameters import number as number
from lantern_bench.methods.parameters import whole_number as whole_number
from lantern_bench.methods.parameters import word as word
from lantern_bench.methods.rules import Rule as Rule
from lantern_bench.methods.rules import neighbour_rule as neighbour_rule
from lantern_bench.methods.rules import probability_rule as probability_rule
from lantern_bench.methods.rules import tree_rule as tree_rule
