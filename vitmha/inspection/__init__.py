"""What the heads do, as numbers, pictures and a page."""

from vitmha.inspection.compare import HeadComparison, compare_heads
from vitmha.inspection.faithfulness import faithfulness, perturbation_area, points_at
from vitmha.inspection.figures import draw_head_numbers, draw_maps
from vitmha.inspection.head_metrics import HeadNumbers, attention_distance, attention_entropy, head_divergence
from vitmha.inspection.maps import js_divergence, mass_mask, relevance, rollout, value_weighted
from vitmha.inspection.record import RecordedAttention, record_attention

__all__ = [
    "HeadComparison",
    "HeadNumbers",
    "RecordedAttention",
    "attention_distance",
    "attention_entropy",
    "compare_heads",
    "draw_head_numbers",
    "draw_maps",
    "faithfulness",
    "head_divergence",
    "js_divergence",
    "mass_mask",
    "perturbation_area",
    "points_at",
    "record_attention",
    "relevance",
    "rollout",
    "value_weighted",
]
