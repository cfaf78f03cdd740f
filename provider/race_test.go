// SPDX-License-Identifier: Apache-2.0

//go:build race

package provider_test

// raceDetector says whether it is in use: what one goroutine does in virtual time is then
// tested by a few of its cases, as it has no races, and takes ten times as long.
const raceDetector = true
