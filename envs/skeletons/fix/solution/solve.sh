#!/bin/sh
sed -i 's,discount // 100,discount / 100,' totals.py
