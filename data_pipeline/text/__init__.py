"""Stages that look at one document: repair, language, length."""
