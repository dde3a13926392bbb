"""What the heads do, as numbers, pictures and a page."""

from vitmha.inspection.heads import HeadNumbers, attention_distance, attention_entropy, head_divergence
from vitmha.inspection.maps import js_divergence, mass_mask, relevance, rollout, value_weighted
from vitmha.inspection.pictures import draw_head_numbers, draw_maps
from vitmha.inspection.record import RecordedAttention, record_attention

__all__ = [
    "HeadNumbers",
    "RecordedAttention",
    "attention_distance",
    "attention_entropy",
    "draw_head_numbers",
    "draw_maps",
    "head_divergence",
    "js_divergence",
    "mass_mask",
    "record_attention",
    "relevance",
    "rollout",
    "value_weighted",
]
