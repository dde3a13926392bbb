"""Writes the model cards of the bundled models from their config.json and training_summary.json."""

from vitmha.weights.load import load_model
from vitmha.weights.model_card import CARD_FILE, model_card
from vitmha.weights.shipped import SHIPPED, list_models
from vitmha.weights.training_summary import read_summary

if __name__ == "__main__":
    for name in list_models():
        card = model_card(load_model(name), read_summary(name), location=name)
        (SHIPPED / name / CARD_FILE).write_text(card, encoding="utf-8")
