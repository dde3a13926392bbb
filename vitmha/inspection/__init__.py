"""What each attention head does: recorded maps, metrics, comparisons, figures and an interactive page."""

from vitmha.inspection.compare import HeadComparison, compare_heads
from vitmha.inspection.faithfulness import faithfulness, perturbation_auc, pointing_game
from vitmha.inspection.figures import draw_head_metrics, draw_maps
from vitmha.inspection.head_metrics import HeadMetrics, attention_distance, attention_entropy, head_divergence
from vitmha.inspection.maps import js_divergence, mass_mask, relevance, rollout, value_weighted
from vitmha.inspection.record import RecordedAttention, record_attention

__all__ = [
    "HeadComparison",
    "HeadMetrics",
    "RecordedAttention",
    "attention_distance",
    "attention_entropy",
    "compare_heads",
    "draw_head_metrics",
    "draw_maps",
    "faithfulness",
    "head_divergence",
    "js_divergence",
    "mass_mask",
    "perturbation_auc",
    "pointing_game",
    "record_attention",
    "relevance",
    "rollout",
    "value_weighted",
]
