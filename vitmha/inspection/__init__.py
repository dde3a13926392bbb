"""What the heads do, as numbers and pictures."""

from vitmha.inspection.heads import attention_distance, attention_entropy
from vitmha.inspection.pictures import draw_head_numbers, draw_maps
from vitmha.inspection.record import RecordedAttention, record_attention

__all__ = [
    "RecordedAttention",
    "attention_distance",
    "attention_entropy",
    "draw_head_numbers",
    "draw_maps",
    "record_attention",
]
