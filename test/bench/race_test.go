// SPDX-License-Identifier: Apache-2.0

//go:build race

package main

// raceDetector says whether it is in use.
const raceDetector = true
