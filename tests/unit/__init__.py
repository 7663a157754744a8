"""Tests of single modules, without other processes of the deployment."""
