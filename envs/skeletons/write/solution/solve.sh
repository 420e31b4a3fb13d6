#!/bin/sh
cp /solution/roman.py roman.py
