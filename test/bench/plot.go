// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math"
	"path/filepath"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
)

// point is one of a curve's.
type point struct{ x, y float64 }

// curve is a line through points.
type curve struct {
	name string
	at   []point
}

// tick is a place on the x axis and its name.
type tick struct {
	at   float64
	name string
}

// picture is a diagram. Logarithmic axes have ticks at powers of ten, others where
// the library finds them good; the x axis where ticks says, if it does.
type picture struct {
	title, x, y string
	logX, logY  bool
	ticks       []tick
	names       []string // of x = 0, 1, …
	curves      []curve
}

// draw writes a picture to dir/name.svg. What it writes depends on the points alone.
func draw(dir, name string, p picture) error {
	d := plot.New()
	d.Title.Text, d.X.Label.Text, d.Y.Label.Text = p.title, p.x, p.y
	d.Title.Padding = vg.Points(6)
	d.Legend.Top, d.Legend.Left = true, true
	d.Add(plotter.NewGrid())
	for i, c := range p.curves {
		xy := make(plotter.XYs, len(c.at))
		for k, q := range c.at {
			xy[k].X, xy[k].Y = q.x, q.y
		}
		line, dots, err := plotter.NewLinePoints(xy)
		if err != nil {
			return fmt.Errorf("plot %s, %s: %w", name, c.name, err)
		}
		line.Color, dots.Color = plotutil.Color(i), plotutil.Color(i)
		line.Width = vg.Points(1.5)
		if n := len(plotutil.DefaultColors); i >= n { // the colours begin again
			line.Dashes = plotutil.Dashes(i / n)
		}
		dots.Shape = plotutil.Shape(i)
		d.Add(line, dots)
		d.Legend.Add(c.name, line, dots)
	}
	if p.logX {
		d.X.Scale, d.X.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
		d.X.Max *= 2 // the last label is centred
	}
	if p.logY {
		d.Y.Scale, d.Y.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
		if len(p.curves) > 2 {
			d.Y.Max *= math.Pow(d.Y.Max/d.Y.Min, 0.1*float64(len(p.curves)-1)) // room for the legend
		}
	} else {
		d.Y.Min = 0
		if len(p.curves) > 4 || p.names != nil {
			d.Y.Max *= 1.5
		}
	}
	if p.ticks != nil {
		var ts plot.ConstantTicks
		for _, t := range p.ticks {
			ts = append(ts, plot.Tick{Value: t.at, Label: t.name})
		}
		d.X.Tick.Marker = ts
	}
	if p.names != nil {
		d.NominalX(p.names...)
		d.X.Min, d.X.Max = -0.3, float64(len(p.names))-0.7
	}
	return d.Save(16*vg.Centimeter, 10*vg.Centimeter, filepath.Join(dir, name+".svg"))
}

// bars are one colour's in a diagram, from left to right.
type bars struct {
	name string
	at   []float64
}

// drawBars writes a diagram of bars in groups to dir/name.svg; names are the groups'.
func drawBars(dir, name, title, y string, names []string, groups ...bars) error {
	d := plot.New()
	d.Title.Text, d.Y.Label.Text = title, y
	d.Title.Padding = vg.Points(6)
	d.Legend.Top = true
	width := vg.Points(24 / float64(len(groups)))
	for i, g := range groups {
		bs, err := plotter.NewBarChart(plotter.Values(g.at), width)
		if err != nil {
			return fmt.Errorf("plot %s, %s: %w", name, g.name, err)
		}
		bs.Color, bs.LineStyle.Width = plotutil.Color(i), 0
		bs.Offset = width*vg.Length(i) - width*vg.Length(len(groups)-1)/2
		d.Add(bs)
		d.Legend.Add(g.name, bs)
	}
	d.Y.Min = 0
	d.Y.Max *= 1.2 // room for the legend
	d.NominalX(names...)
	d.X.Min, d.X.Max = -0.6, float64(len(names))-0.4
	d.X.Tick.Label.Rotation = 0.35
	d.X.Tick.Label.XAlign, d.X.Tick.Label.YAlign = text.XRight, text.YTop
	return d.Save(20*vg.Centimeter, 11*vg.Centimeter, filepath.Join(dir, name+".svg"))
}
