"""Doing and keeping: executing a plan and storing what came out of it.

Images are decoded and scored from here; how a decode works is `decode/`, how tables are made is `report/`.
"""
