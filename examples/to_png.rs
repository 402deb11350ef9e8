//! A tensor [.., h, w, 3] with values from 0 to 1 as a PNG file:
//! `cargo run --release --example to_png -- IN.npy OUT.png`

use image::RgbImage;
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [input, output] = &args[..] else { return Err("usage: to_png IN.npy OUT.png".into()) };
    let tensor = windrow_cli::files::read(input)?;
    let [.., height, width, 3] = *tensor.shape() else {
        return Err(
            format!("{input} has shape {:?}, expected [.., h, w, 3]", tensor.shape()).into()
        );
    };
    let bytes = tensor.to_vec::<f32>()?.iter().map(|v| (v * 255.0).round() as u8).collect();
    let image =
        RgbImage::from_raw(width as u32, height as u32, bytes).ok_or("more than one image")?;
    image.save(output)?;
    Ok(())
}
