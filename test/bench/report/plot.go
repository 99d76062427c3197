package main

import (
	"cmp"
	"encoding/xml"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// point is a figure of a curve.
type point struct{ x, y, min, max float64 }

// points returns the figures of a curve, by x.
func (r results) points(c curve) (points []point) {
	for name, units := range r.Figures {
		family, n, _ := strings.Cut(name, "=")
		x, err := strconv.ParseFloat(n, 64)
		f, ok := units[c.quantity.unit]
		if family != c.family || err != nil || !ok {
			continue
		}
		k := c.quantity.factor
		points = append(points, point{x, f.Median * k, f.Min * k, f.Max * k})
	}
	slices.SortFunc(points, func(a, b point) int { return cmp.Compare(a.x, b.x) })
	return points
}

// The size of a plot, and its margins.
const (
	plotWidth, plotHeight                   = 640, 300
	left, right, above, below               = 70, 20, 40, 45
	plotStyle                               = `font-family="sans-serif" font-size="12" fill="#555"`
	lineColor, areaColor, gridColor         = "#2563eb", "#93c5fd", "#ccc"
	gridLines                               = 4
	innerWidth, innerHeight         float64 = plotWidth - left - right, plotHeight - above - below
)

// plot draws a curve as SVG: a logarithmic axis for x, a linear one from 0 for y, and the area between the least and the largest figures.
func (c curve) plot(points []point) string {
	first, last := math.Log(points[0].x), math.Log(points[len(points)-1].x)
	top := 0.0
	for _, p := range points {
		top = max(top, p.max)
	}
	top *= 1.1
	at := func(x, y float64) string {
		return fmt.Sprintf("%.1f,%.1f", left+innerWidth*(math.Log(x)-first)/(last-first), above+innerHeight*(1-y/top))
	}
	var b strings.Builder
	_, _ = fmt.Fprintf(&b, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" %s>\n<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n", plotWidth, plotHeight, plotStyle)
	text := func(x, y float64, anchor, s string) {
		var escaped strings.Builder
		_ = xml.EscapeText(&escaped, []byte(s)) // a strings.Builder has no errors
		_, _ = fmt.Fprintf(&b, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%s</text>\n", x, y, anchor, escaped.String())
	}
	text(left, above-18, "start", c.title)
	for i := range gridLines + 1 {
		y := above + innerHeight*float64(i)/gridLines
		_, _ = fmt.Fprintf(&b, "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"%s\"/>\n", left, plotWidth-right, y, y, gridColor)
		text(left-6, y+4, "end", number(top*float64(gridLines-i)/gridLines))
	}
	var line, upper, lower []string
	for _, p := range points {
		line, upper = append(line, at(p.x, p.y)), append(upper, at(p.x, p.max))
		lower = append([]string{at(p.x, p.min)}, lower...)
		x, _, _ := strings.Cut(at(p.x, 0), ",")
		_, _ = fmt.Fprintf(&b, "<text x=\"%s\" y=\"%d\" text-anchor=\"middle\">%s</text>\n", x, plotHeight-below+18, number(p.x))
	}
	text(left+innerWidth/2, plotHeight-8, "middle", c.axis+"; "+c.quantity.as)
	_, _ = fmt.Fprintf(&b, "<polygon points=\"%s\" fill=\"%s\" fill-opacity=\"0.5\"/>\n", strings.Join(append(upper, lower...), " "), areaColor)
	_, _ = fmt.Fprintf(&b, "<polyline points=\"%s\" fill=\"none\" stroke=\"%s\" stroke-width=\"2\"/>\n</svg>\n", strings.Join(line, " "), lineColor)
	return b.String()
}
