//! The f64 oracle of the stages of Winograd's algorithm: `U = G g G^T`, `V = B^T d B`, and the
//! products `M = sum_c U V`.

use super::winograd::{MAX_ALPHA, Rational, TAPS};
use super::{Problem, Tile};
use crate::Result;
use crate::lists::{collected, filled};
use crate::verification::Expected;

/// U [position, k, c], V [position, tile, c] and M [position, tile, k], with tiles ordered
/// [n, tile row, tile column].
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stages<T> {
    pub u: T,
    pub v: T,
    pub m: T,
}

/// The stages of `x` [n, c, h, w] and `w` [k, c, 3, 3]. The scales of U and V are the sums of the absolute terms of
/// their elements. To these are added the shares `lost`: for U of the largest magnitude of an output channel's filter,
/// for V of the largest magnitude of an image. The scale of M is computed from theirs, because M carries their errors.
pub(crate) fn stages(
    p: &Problem,
    tile: Tile,
    x: &[f64],
    w: &[f64],
    lost: [f64; 2],
) -> Result<Stages<Expected>> {
    let t = tile.transforms();
    let mut u = filter(p, &t.g.map(|row| row.map(Rational::to_f64))[..t.alpha], w)?;
    let mut v = input(p, tile, &t.bt.map(|row| row.map(Rational::to_f64)), x)?;
    let (filters, images) = (largest(w, p.k)?, largest(x, p.n)?);
    for (i, scale) in u.scale.iter_mut().enumerate() {
        *scale += lost[0] * filters[i / p.c % p.k];
    }
    let tiles = tiles(p, tile);
    for (i, scale) in v.scale.iter_mut().enumerate() {
        *scale += lost[1] * images[i / p.c % tiles / (tiles / p.n)];
    }
    let m = products(p, tile, &u, &v)?;
    Ok(Stages { u, v, m })
}

/// The largest finite magnitude of each of `parts` equal parts.
fn largest(values: &[f64], parts: usize) -> Result<Vec<f64>> {
    let finite =
        |part: &[f64]| part.iter().map(|v| v.abs()).filter(|v| v.is_finite()).fold(0.0, f64::max);
    match values.len() / parts.max(1) {
        0 => filled(0.0, parts),
        len => collected(values.chunks_exact(len).map(finite)),
    }
}

fn filter(p: &Problem, g: &[[f64; TAPS]], w: &[f64]) -> Result<Expected> {
    let alpha = g.len();
    let mut u = Expected::zeros(alpha * alpha * p.k * p.c)?;
    for (position, filter) in pairs(alpha * alpha, p.k * p.c) {
        let (i, j) = (position / alpha, position % alpha);
        for (r, s) in pairs(TAPS, TAPS) {
            let term = g[i][r] * g[j][s] * w[(filter * TAPS + r) * TAPS + s];
            u.add(position * p.k * p.c + filter, term);
        }
    }
    Ok(u)
}

fn input(p: &Problem, tile: Tile, bt: &[[f64; MAX_ALPHA]], x: &[f64]) -> Result<Expected> {
    let (m, alpha) = (tile.m(), tile.alpha());
    let grid = [p.oh.div_ceil(m), p.ow.div_ceil(m)];
    let tiles = tiles(p, tile);
    let mut v = Expected::zeros(alpha * alpha * tiles * p.c)?;
    for (index, c) in pairs(tiles, p.c) {
        let (n, row, column) =
            (index / (grid[0] * grid[1]), index / grid[1] % grid[0], index % grid[1]);
        for (y, z) in pairs(alpha, alpha) {
            let Some(ih) = (row * m + y).checked_sub(p.padding[0]).filter(|&i| i < p.h) else {
                continue;
            };
            let Some(iw) = (column * m + z).checked_sub(p.padding[1]).filter(|&i| i < p.w) else {
                continue;
            };
            let d = x[((n * p.c + c) * p.h + ih) * p.w + iw];
            for (i, j) in pairs(alpha, alpha) {
                let at = ((i * alpha + j) * tiles + index) * p.c + c;
                v.add(at, bt[i][y] * bt[j][z] * d);
            }
        }
    }
    Ok(v)
}

fn products(p: &Problem, tile: Tile, u: &Expected, v: &Expected) -> Result<Expected> {
    let (positions, tiles) = (tile.alpha() * tile.alpha(), tiles(p, tile));
    let mut m = Expected::zeros(positions * tiles * p.k)?;
    for (row, k) in pairs(positions * tiles, p.k) {
        let position = row / tiles;
        for c in 0..p.c {
            let (iu, iv) = ((position * p.k + k) * p.c + c, row * p.c + c);
            m.values[row * p.k + k] += u.values[iu] * v.values[iv];
            m.scale[row * p.k + k] += u.scale[iu] * v.scale[iv];
        }
    }
    Ok(m)
}

/// Tiles of the whole batch.
fn tiles(p: &Problem, tile: Tile) -> usize {
    p.n * p.oh.div_ceil(tile.m()) * p.ow.div_ceil(tile.m())
}

fn pairs(a: usize, b: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..a).flat_map(move |i| (0..b).map(move |j| (i, j)))
}
