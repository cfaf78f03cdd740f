// SPDX-License-Identifier: Apache-2.0

//go:build race

package engines

// longest is a long message; the race detector makes the longest take minutes.
const longest = 48 << 20

// raceDetector says whether it is in use.
const raceDetector = true
